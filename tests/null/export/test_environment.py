"""Tests how the environment for exports is made, with an interpreter that only writes down what it is asked for."""

from __future__ import annotations

import json
import sys
import tempfile
from types import SimpleNamespace

import pytest
from support.export.stub_python import NAME, calls_of, has_ended, right_versions, stub_python

from staticllm.errors import ConfigError, ModelError
from staticllm.export import environment
from staticllm.export.environment import MARKER, ask, check_python, default_folder, find_environment, python_in, set_up
from staticllm.export.packages import installations
from staticllm.system.file_lock import acquire


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The folder of the interpreter that set-up starts; the cache is beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "stub"
    folder.mkdir()
    monkeypatch.setattr(sys, "executable", str(stub_python(folder, fails_at="--no-deps")))
    return folder


def left():
    """Return what is in the folder of environments, beside locks."""
    folder = default_folder().parent
    return [path.name for path in folder.iterdir() if path.suffix != ".lock"] if folder.is_dir() else []


def test_set_up_makes_it_once_in_the_steps_of_the_list(place):
    steps = []
    found = set_up(lambda text, detail="": steps.append(text))
    calls = calls_of(place)
    assert calls[0] == ["-m", "venv", str(default_folder())]
    installed = [call[call.index("off") + 1 :] for call in calls[1:-1]]
    assert installed == [list(each) for each in installations()]
    assert "installing torch" in steps
    assert found.python.is_file()
    assert found.num_bytes > 0
    assert find_environment() == found
    assert set_up() == found
    assert calls_of(place) == calls, "a second set-up runs nothing"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            "ERROR: no\nERROR: No matching distribution found for optimum\n[notice] new pip\n",
            "for optimum: check the index",
        ),
        ("WARNING: NewConnectionError\nERROR: No matching distribution\n", "there is no connection; check the network"),
        ("ERROR: Could not install packages: [Errno 28] No space left on device\n", "free space"),
        ("", "it said nothing"),
    ],
)
def test_a_failure_of_pip_is_one_line_and_leaves_nothing(said, words, place):
    (place / "pip_fails").write_text(said)
    with pytest.raises(ConfigError) as error:
        set_up()
    assert str(error.value).startswith("pip install optimum optimum-intel failed: ")
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert left() == []
    assert find_environment() is None


def test_what_a_killed_process_left_is_made_anew(place):
    folder = default_folder()
    python_in(folder).parent.mkdir(parents=True)
    python_in(folder).write_text("half")
    (folder / "rest").write_text("")
    assert find_environment() is None, "without the mark it is not whole"
    set_up()
    assert not (folder / "rest").exists()
    assert json.loads((folder / MARKER).read_text())["num_bytes"] > 0


def test_an_interruption_leaves_nothing(place):
    def interrupt(text, detail=""):
        if text.startswith("installing nncf"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        set_up(interrupt)
    assert left() == []


def test_what_a_killed_pip_leaves_in_temporary_folders_is_removed(place, tmp_path, monkeypatch):
    stub_python(place, pip_seconds=600)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))

    def interrupt(text, detail=""):
        if detail:
            assert list(temporary.glob("*/*")), "pip has made a folder"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        set_up(interrupt)
    assert left() == []
    assert list(temporary.iterdir()) == []


def test_no_room_is_said_before_anything_is_made(place, monkeypatch):
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    with pytest.raises(ConfigError, match=r"needs 3 GB or more .* has 1\.0 GB free: free some, set XDG_CACHE_HOME"):
        set_up()
    assert not (place / "calls").exists()


def test_two_set_ups_do_not_meet(place):
    folder = default_folder()
    folder.parent.mkdir(parents=True)
    with acquire(folder.with_name(f"{folder.name}.lock")) as lease:
        lease.hand_over()
        with pytest.raises(ConfigError, match="another process sets up"):
            set_up()


def test_a_cache_that_is_a_file_is_named(place, tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be made in .* set XDG_CACHE_HOME"):
        set_up()


def test_other_versions_have_another_folder(place, monkeypatch):
    before = default_folder()
    monkeypatch.setattr(environment, "installations", lambda: (("torch==9",),))
    assert default_folder() != before


def test_an_interpreter_is_checked(tmp_path):
    check_python(stub_python(tmp_path))
    stub_python(tmp_path, versions={**right_versions(), "torch": "1.0", "nncf": None})
    with pytest.raises(ConfigError, match=r"torch is 1\.0, torch>=2\.13,<3 is needed, and 1 more: install it there"):
        check_python(tmp_path / NAME)


@pytest.mark.parametrize("text", ["no program", "#!/bin/sh\nexit 3\n", "#!/bin/sh\necho hello\n"])
def test_what_is_no_python_is_one_line(text, tmp_path):
    path = tmp_path / NAME
    path.write_text(text)
    path.chmod(0o755)
    with pytest.raises(ConfigError, match="is no Python that can export") as error:
        check_python(path)
    assert "\n" not in str(error.value)


def test_a_missing_interpreter_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"it cannot be started: \w"):
        check_python(tmp_path / "none")


def test_a_tool_that_hangs_is_ended(tmp_path):
    python = stub_python(tmp_path, work="time.sleep(600)")
    with pytest.raises(ModelError, match="did not end in 1 s"):
        ask(python, {"do": "export"}, 1.0)
    assert has_ended(int((tmp_path / "pid").read_text()))


def test_a_frozen_application_says_what_helps(place, monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(ConfigError, match="a frozen application cannot export"):
        set_up()
