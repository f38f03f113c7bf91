"""Tests where the daemon of a user may listen."""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from staticllm.wire import endpoint, held_files


@pytest.mark.parametrize(
    "name", ["STATICLLM_RUNTIME_DIR", "LOCALAPPDATA" if sys.platform == "win32" else "XDG_RUNTIME_DIR"]
)
def test_a_relative_runtime_folder_is_refused(name, monkeypatch, tmp_path):
    """The daemon runs in another working directory than its programs, and would serve another folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STATICLLM_RUNTIME_DIR", raising=False)
    monkeypatch.setenv(name, "run")
    with pytest.raises(endpoint.EndpointError, match="is relative: set STATICLLM_RUNTIME_DIR"):
        endpoint.runtime_folder()
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="pipes have names of their own")
@pytest.mark.parametrize("name", ["STATICLLM_RUNTIME_DIR", "XDG_RUNTIME_DIR", "TMPDIR"])
def test_a_folder_whose_socket_would_have_too_long_a_path_is_refused_at_once(name, monkeypatch, tmp_path):
    for other in ("STATICLLM_RUNTIME_DIR", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(other, raising=False)
    folder = tmp_path / ("x" * 130)
    monkeypatch.setenv(name, str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder) if name == "TMPDIR" else None)
    with pytest.raises(
        endpoint.EndpointError, match=r"bytes long, 100 are possible: set STATICLLM_RUNTIME_DIR"
    ) as error:
        endpoint.runtime_folder()
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())
    assert endpoint.private_folder().is_dir()  # files may be there


@pytest.mark.skipif(sys.platform == "win32", reason="pipes have names of their own")
def test_the_longest_folder_of_a_socket_is_taken(monkeypatch, tmp_path):
    base = tempfile.mkdtemp(prefix="s", dir="/tmp")
    try:
        longest = endpoint.MAX_UNIX_PATH - len("/socket")
        for length, is_taken in ((longest, True), (longest + 1, False)):
            folder = Path(base) / ("x" * (length - len(base) - 1))
            monkeypatch.setenv("STATICLLM_RUNTIME_DIR", str(folder))
            if is_taken:
                endpoint.listen(endpoint.runtime_folder()).close()
            else:
                with pytest.raises(endpoint.EndpointError, match="101 bytes long"):
                    endpoint.runtime_folder()
    finally:
        shutil.rmtree(base)


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


def test_a_key_is_read_as_it_was_written(monkeypatch, tmp_path):
    """Whatever its bytes are: text mode would change ends of lines on Windows."""
    monkeypatch.setattr(endpoint.secrets, "token_bytes", lambda count: b"\n\r\x1a\0" * (count // 4))
    for _ in range(2):  # the second one takes the place of the first
        key = endpoint.make_key(tmp_path)
        assert endpoint.read_key(tmp_path) == key


def test_a_file_that_somebody_holds_is_tried_again_on_windows_only(monkeypatch):
    tries = []

    def change():
        tries.append(None)
        if len(tries) < 3:
            raise PermissionError("held")
        return 5

    monkeypatch.setattr(held_files.sys, "platform", "win32")
    assert held_files.patiently(change) == 5
    assert len(tries) == 3
    tries.clear()
    monkeypatch.setattr(held_files, "PATIENCE_SECONDS", 0.0)
    with pytest.raises(PermissionError):
        held_files.patiently(change)
    tries.clear()
    monkeypatch.setattr(held_files.sys, "platform", "linux")
    with pytest.raises(PermissionError):
        held_files.patiently(change)
    assert len(tries) == 1


def test_a_key_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "key" / "folder").mkdir(parents=True)
    with pytest.raises(OSError):
        endpoint.make_key(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
