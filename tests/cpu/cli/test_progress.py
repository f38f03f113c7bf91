"""Tests the progress bar on stderr, which appears only on a terminal and is cleared at the end."""

from __future__ import annotations

import io
import threading
import time
from contextlib import redirect_stderr

import pytest

from staticllm.cli import progress as progress_module
from staticllm.cli.progress import progress
from staticllm.core import ProgressEvent, Variant


class Screen(io.StringIO):
    """A terminal that keeps all that was written."""

    def isatty(self):
        return True

    @property
    def line(self):
        """The current content of the cursor's line."""
        shown = ""
        for part in self.getvalue().rpartition("\n")[2].split("\r"):
            shown = part + shown[len(part) :]
        return shown.rstrip()


@pytest.fixture
def screen(monkeypatch):
    screen = Screen()
    monkeypatch.setattr(progress_module, "DELAY_SECONDS", 0.01)
    monkeypatch.setattr(progress_module, "TICK_SECONDS", 0.01)
    return screen


def wait_for(screen, text):
    deadline = time.monotonic() + 10
    while text not in screen.line and time.monotonic() < deadline:
        time.sleep(0.005)
    assert text in screen.line


def test_the_bar_follows_every_part_of_a_load_and_is_cleared(screen):
    with redirect_stderr(screen), progress("loading") as shown:
        wait_for(screen, "loading … 00:00")
        shown(ProgressEvent("compile", 2, 5, 0.0, Variant(1, 64), is_done=False))
        wait_for(screen, "compiling: 1/5")
        shown(ProgressEvent("compile", 2, 5, 1.0, Variant(1, 64)))
        wait_for(screen, "compiling: 2/5")
        assert screen.line.endswith("00:00"), "the elapsed time"
    assert screen.line == ""
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


def test_a_bar_that_is_closed_early_stays_away(screen):
    with redirect_stderr(screen), progress("running the prompt") as shown:
        wait_for(screen, "running the prompt")
        shown.close()
        screen.write("the answer")
        time.sleep(0.1)
        shown.show("more", 1, 2)
        assert screen.line == "the answer"
    assert screen.line == "the answer"


def test_an_error_clears_the_bar(screen):
    with pytest.raises(ValueError, match="x"), redirect_stderr(screen), progress("loading"):
        wait_for(screen, "loading")
        raise ValueError("x")
    assert screen.line == ""


def test_a_line_of_output_clears_the_bar_first(screen, capsys):
    with redirect_stderr(screen), progress("comparing") as shown:
        wait_for(screen, "comparing")
        shown.write("the first result")
        assert capsys.readouterr().out == "the first result\n"


@pytest.mark.parametrize("stderr", [io.StringIO(), None])
def test_nothing_is_written_without_a_terminal(stderr, monkeypatch):
    monkeypatch.setattr(progress_module, "DELAY_SECONDS", 0.0)
    with redirect_stderr(stderr), progress("loading") as shown:
        time.sleep(0.05)
        shown.show("more", 1, 2)
    assert stderr is None or stderr.getvalue() == ""


def test_quick_work_shows_no_bar(screen, monkeypatch):
    monkeypatch.setattr(progress_module, "DELAY_SECONDS", 10.0)
    with redirect_stderr(screen), progress("loading"):
        pass
    assert screen.getvalue() == ""
