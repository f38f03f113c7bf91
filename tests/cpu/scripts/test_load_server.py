"""Tests the load of a server, for a short time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

for package in ("fastapi", "uvicorn", "sse_starlette", "prometheus_client", "h11"):
    pytest.importorskip(package)

SCRIPT = Path(__file__).parents[3] / "scripts" / "load_server.py"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="the server is ended by a signal")
@pytest.mark.parametrize("extra", [[], ["--", "--supervise"]], ids=["in process", "supervised"])
def test_a_loaded_server_answers_rightly_and_keeps_nothing(tmp_path, monkeypatch, extra):
    monkeypatch.setenv("STATICLLM_RUNTIME_DIR", str(tmp_path / "r"))
    command = [sys.executable, str(SCRIPT), "--clients", "12", "--seconds", "8", *extra]
    result = subprocess.run(command, capture_output=True, encoding="utf-8", check=False, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    found = json.loads(result.stdout)
    assert found["ends"]["stream: right"] > 10 and found["gap_ms"]["p99"] > 0
    assert any("413" in name for name in found["ends"]) and "leave: left" in found["ends"]


def test_a_refusal_must_be_proper():
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        from load_server import WrongError, check_refusal
    finally:
        sys.path.remove(str(SCRIPT.parent))
    body = json.dumps({"error": {"message": "too much"}}).encode()
    assert check_refusal(413, {}, body, (413,)) == "refused with 413"
    assert check_refusal(429, {"retry-after": "1"}, body, (429,)) == "refused with 429"
    for status, headers, data in (
        (429, {}, body),
        (500, {}, body),
        (413, {}, b"<html>"),
        (413, {}, b'{"error": "text"}'),
    ):
        with pytest.raises(WrongError):
            check_refusal(status, headers, data, (413, 429))
