"""Tests where the daemon of a user may listen."""

from __future__ import annotations

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
