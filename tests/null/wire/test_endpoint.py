"""Tests where the daemon of a user may listen."""

from __future__ import annotations

import threading

import pytest

from staticllm.wire import endpoint


@pytest.mark.parametrize("name", ["STATICLLM_RUNTIME_DIR", "XDG_RUNTIME_DIR"])
def test_a_relative_runtime_folder_is_refused(name, monkeypatch, tmp_path):
    """The daemon runs in another working directory than its programs, and would serve another folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STATICLLM_RUNTIME_DIR", raising=False)
    monkeypatch.setenv(name, "run")
    with pytest.raises(endpoint.EndpointError, match="is relative: set STATICLLM_RUNTIME_DIR"):
        endpoint.runtime_folder()
    assert not list(tmp_path.iterdir())


def test_a_daemon_that_ends_while_it_is_greeted_is_not_said_to_refuse_the_key(tmp_path):
    endpoint.make_key(tmp_path)
    with endpoint.listen(tmp_path) as listener:
        thread = threading.Thread(target=lambda: listener.accept().close())
        thread.start()
        with pytest.raises(endpoint.GoneError, match="it has ended, or has too many clients"):
            endpoint.connect(tmp_path)
        thread.join()
    with pytest.raises(endpoint.GoneError, match="no daemon listens"):
        endpoint.connect(tmp_path)
