"""Several values of Content-Length, which proxies read in several ways, are refused."""

import pytest

pytest.importorskip("h11")
pytest.importorskip("uvicorn")

from staticllm.server.http.protocol import flaw_of

POST = b"POST / HTTP/1.1\r\nHost: a\r\n"


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: 30, 30\r\n",
        b"content-length:30,30\r\n",
        b"Content-Length: 30,\r\n",
        b"Content-Length: 30\r\nContent-Length: 30\r\n",
        b"Content-Length: 30\r\nX: y\r\nCONTENT-LENGTH: 31\r\n",
    ],
)
def test_several_lengths_are_refused(lines):
    assert "several values" in flaw_of(POST + lines + b"\r\n" + b"x" * 30)


def test_one_length_and_other_lists_are_fine():
    assert not flaw_of(POST + b"Content-Length: 30\r\nAccept: a, b\r\nX-Content-Length: 1, 2\r\n\r\n")
    assert not flaw_of(POST + b"Content-Length: 3\r\n\r\nContent-Length: 3, 3\r\n")
