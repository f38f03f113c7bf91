"""Tests the examples: the terminal chat in a child process, and the window on a virtual screen."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import itertools
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
MODEL = Path(os.environ.get("STATICLLM_ZOO", ROOT.parent / "shared" / "zoo")) / "llama"
HINT = "Type a message below and press Enter. Escape, or Stop, ends an answer.\n"
TIMEOUT = 60  # seconds; only a failing test waits for so long
PROMPT_SECONDS = 2  # much longer than a token takes, even on a busy machine


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the test if something is missing, but fail in CI, which has to install it."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def model_dir() -> Path:
    if not MODEL.is_dir():
        skip_or_fail(f"no model at {MODEL}: set STATICLLM_ZOO")
    return MODEL


@pytest.fixture(scope="module")
def screen() -> Iterator[None]:
    """Start a virtual screen on the first free display."""
    if sys.platform in ("win32", "darwin"):
        pytest.skip(f"Xvfb does not run on {sys.platform}")
    xvfb = shutil.which("Xvfb")
    if xvfb is None:
        skip_or_fail("Xvfb is missing: apt-get install xvfb")
    read_end, write_end = os.pipe()
    arguments = [xvfb, "-displayfd", str(write_end), "-screen", "0", "1024x768x24", "-nolisten", "tcp"]
    server = subprocess.Popen(arguments, pass_fds=[write_end], stderr=subprocess.DEVNULL)
    os.close(write_end)
    with os.fdopen(read_end) as pipe, pytest.MonkeyPatch.context() as patch:
        display = pipe.readline().strip()
        assert display, "Xvfb did not start"
        patch.setenv("DISPLAY", f":{display}")
        patch.delenv("XAUTHORITY", raising=False)
        yield
    server.terminate()
    server.wait(TIMEOUT)


@pytest.fixture(autouse=True)
def collect_windows_here() -> Iterator[None]:
    """Tcl aborts the process if a worker thread of the next test collects this test's window."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def example(screen: None) -> ModuleType:
    pytest.importorskip("tkinter")
    spec = importlib.util.spec_from_file_location("chat_window", EXAMPLES / "chat_window.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Driver:
    """Presses the keys and buttons of a window, and runs its event loop meanwhile."""

    def __init__(self, example: ModuleType, model_dir: Path | str) -> None:
        self.root = example.tk.Tk()
        self.window = example.ChatWindow(self.root, str(model_dir))
        self.is_open = True

    @property
    def text(self) -> str:
        text: str = self.window.history.get("1.0", "end-1c")
        return text

    @property
    def status(self) -> str:
        return str(self.window.status.cget("text"))

    def is_enabled(self, name: str) -> bool:
        return str(getattr(self.window, f"{name}_button").cget("state")) == "normal"

    def wait(self, condition: Callable[[], object]) -> float:
        """Run the loop until ``condition`` holds. Return the seconds that it took."""
        start = time.perf_counter()
        while not condition():
            assert time.perf_counter() - start < TIMEOUT, f"waited in vain; the window shows {self.text[-300:]!r}"
            self.root.update()
            time.sleep(0.002)
        return time.perf_counter() - start

    def wait_until_ready(self) -> float:
        return self.wait(lambda: self.is_enabled("send"))

    def press(self, key: str) -> None:
        self.window.entry.focus_force()
        self.root.update()
        self.window.entry.event_generate(key)

    def send(self, prompt: str) -> None:
        self.window.entry.insert(0, prompt)
        self.press("<Return>")
        assert not self.is_enabled("send")
        assert self.is_enabled("stop")

    def wait_for_text(self, num_chars: int = 1) -> None:
        enough = len(self.text) + num_chars
        self.wait(lambda: len(self.text) >= enough)

    def close(self) -> None:
        """Close the window as the window manager would, and return as ``run`` does."""
        if self.is_open:
            self.is_open = False
            self.root.after(10, self._destroy)
            self.window.run()

    def _destroy(self) -> None:
        for timer in self.root.tk.splitlist(self.root.tk.call("after", "info")):
            self.root.after_cancel(timer)  # otherwise the loop of the next window would run it, and print an error
        self.root.destroy()


@pytest.fixture
def open_window(example: ModuleType) -> Iterator[Callable[[Path | str], Driver]]:
    drivers: list[Driver] = []

    def open_window(model_dir: Path | str) -> Driver:
        drivers.append(Driver(example, model_dir))
        return drivers[-1]

    yield open_window
    for driver in drivers:
        driver.close()


@pytest.fixture
def driver(open_window: Callable[[Path | str], Driver], model_dir: Path) -> Driver:
    driver = open_window(model_dir)
    driver.wait_until_ready()
    return driver


def chat_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "chat-worker"]


def run_terminal(*arguments: str, stdin: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "chat_terminal.py"), *arguments],
        input=stdin,
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONUTF8": "1"},
        timeout=TIMEOUT,
        check=False,
    )


@pytest.mark.slow
def test_terminal_answers(model_dir: Path) -> None:
    done = run_terminal(str(model_dir), stdin="hello\n")
    assert done.returncode == 0, done.stderr
    answer = done.stdout.removeprefix("\nYou: ")
    assert len(answer.split("\nYou: ")[0]) > 20, done.stdout
    assert not done.stderr


@pytest.mark.slow
def test_terminal_starts_a_new_conversation_when_it_is_too_long(model_dir: Path) -> None:
    done = run_terminal(str(model_dir), stdin="x " * 4000 + "\nhello\n")
    assert done.returncode == 0, done.stderr
    assert "MAX_PROMPT_LEN" in done.stdout
    assert len(done.stdout.split("\nYou: ")[2]) > 20, done.stdout


@pytest.mark.skipif(os.name == "nt", reason="pseudo-terminals are POSIX")
@pytest.mark.parametrize("moment", [pytest.param("at the prompt", marks=pytest.mark.slow), "in an answer"])
def test_ctrl_c_in_the_terminal_leaves_no_traceback(model_dir: Path, moment: str) -> None:
    import pty

    end, child_end = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "chat_terminal.py"), str(model_dir)],
        stdin=child_end, stdout=child_end, stderr=child_end, start_new_session=True,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
    )  # fmt: skip
    os.close(child_end)

    def read_until(word: str) -> str:
        text, until = "", time.monotonic() + TIMEOUT
        while word not in text:
            assert select.select([end], [], [], max(until - time.monotonic(), 0))[0], f"{word!r} never came: {text!r}"
            text += os.read(end, 4096).decode(errors="replace")
        return text

    try:
        read_until("You: ")
        if moment == "in an answer":
            os.write(end, b"hello\n")
            read_until("hello\r\n")
            os.read(end, 4096)
            child.send_signal(signal.SIGINT)
            read_until("[stopped")
            os.write(end, b"\x04")
        else:
            # A signal between the prompt and the read waits inside Python for the next key: one more is needed then.
            for _ in range(3):
                time.sleep(0.5)
                child.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(TIMEOUT / 3)
                    break
        if child.poll() is None and moment == "at the prompt":
            child.send_signal(signal.SIGABRT)  # the stacks of all threads say where it stands
        status = child.wait(TIMEOUT)
        output = os.read(end, 65536).decode(errors="replace")
        assert (status, "Traceback" in output) == (0, False), output
    finally:
        child.kill()
        child.wait()
        os.close(end)


def test_a_wrong_directory_is_a_one_line_error_in_the_terminal() -> None:
    done = run_terminal("/no/such/model", stdin="")
    assert done.returncode == 1
    assert "no model directory" in done.stderr
    assert "Traceback" not in done.stderr


def test_terminal_is_short() -> None:
    assert len((EXAMPLES / "chat_terminal.py").read_text(encoding="utf-8").splitlines()) <= 30


def test_window_opens_at_once_and_shows_progress(open_window: Callable[[Path | str], Driver], model_dir: Path) -> None:
    driver = open_window(model_dir)
    driver.root.update()
    assert driver.window.history.winfo_ismapped()
    assert not driver.is_enabled("send")
    assert not driver.is_enabled("stop")
    seen: set[str] = set()
    driver.wait(lambda: seen.add(driver.status) or driver.is_enabled("send"))
    assert "Loading" in sorted(seen)[0]
    assert driver.status == "Ready"


def test_text_streams(driver: Driver) -> None:
    driver.send("hello")
    sizes: set[int] = set()
    driver.wait(lambda: sizes.add(len(driver.text)) or driver.is_enabled("send"))
    assert "hello" in driver.text
    assert len(sizes) >= 5, f"the text came in {len(sizes)} steps"
    assert not driver.is_enabled("stop")
    assert driver.window.history.yview()[1] > 0.99, "the end is not in view"


def longest_gap(driver: Driver) -> float:
    """Return the longest time in seconds between two ticks of a 20 ms ticker while an answer of full length arrives."""
    ticks = []

    def tick() -> None:
        ticks.append(time.perf_counter())
        ticker[0] = driver.root.after(20, tick)

    driver.send("hello")
    ticker = [driver.root.after(20, tick)]
    driver.wait_until_ready()
    driver.root.after_cancel(ticker[0])
    assert len(ticks) > 3
    return max(after - before for before, after in itertools.pairwise(ticks))


@pytest.mark.slow
def test_window_stays_responsive_while_answering(open_window: Callable[[Path | str], Driver], model_dir: Path) -> None:
    gaps: list[float] = []
    while len(gaps) < 3 and not (gaps and min(gaps) < 0.25):  # any of them may stall on a busy machine
        driver = open_window(model_dir)
        driver.wait_until_ready()
        gaps.append(longest_gap(driver))
        driver.close()
    assert min(gaps) < 0.25, f"the window stood still for {gaps} s"


@pytest.mark.parametrize("by", ["button", "key"])
def test_stop_ends_the_answer_but_not_the_chat(driver: Driver, by: str) -> None:
    driver.send("hello")
    driver.wait_for_text(20)
    if by == "button":
        driver.window.stop_button.invoke()
    else:
        driver.press("<Escape>")
    assert driver.wait_until_ready() < PROMPT_SECONDS
    driver.wait(lambda: driver.text.endswith(" [stopped]"))
    partial = driver.text
    assert len(partial) > 20 + len(HINT)
    driver.send("again")
    driver.wait_for_text(20)
    assert driver.text.startswith(partial), "the partial answer is gone"
    driver.window.stop_button.invoke()
    driver.wait_until_ready()
    assert "MAX_PROMPT_LEN" not in driver.text, "the first answer was not stopped, it filled the cache"


def test_escape_while_loading_does_no_harm(open_window: Callable[[Path | str], Driver], model_dir: Path) -> None:
    driver = open_window(model_dir)
    driver.press("<Escape>")
    driver.wait_until_ready()


def test_empty_message_is_not_sent(driver: Driver) -> None:
    driver.window.entry.insert(0, "   ")
    driver.press("<Return>")
    assert driver.is_enabled("send")
    assert driver.text == HINT


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # SystemExit while loading
@pytest.mark.parametrize("moment", ["loading", "idle", "answering"])
def test_closing_leaves_no_thread(open_window: Callable[[Path | str], Driver], model_dir: Path, moment: str) -> None:
    driver = open_window(model_dir)
    if moment != "loading":
        driver.wait_until_ready()
    if moment == "answering":
        driver.send("hello")
        driver.wait_for_text(20)
    assert chat_threads()
    start = time.perf_counter()
    driver.close()
    assert not chat_threads()
    assert time.perf_counter() - start < PROMPT_SECONDS


def test_wrong_directory_is_shown(open_window: Callable[[Path | str], Driver], tmp_path: Path) -> None:
    driver = open_window(tmp_path / "nothing")
    driver.wait(lambda: "loaded" in driver.status)
    assert "no model directory" in driver.text
    assert "nothing" in driver.text
    assert driver.window.history.tag_ranges("error")
    assert not driver.is_enabled("send")


def test_too_long_message_is_shown_and_the_chat_goes_on(driver: Driver) -> None:
    driver.send("x " * 4000)
    driver.wait_until_ready()
    assert "MAX_PROMPT_LEN" in driver.text
    driver.send("hello")
    driver.wait_for_text(20)
    driver.window.stop_button.invoke()
    driver.wait_until_ready()


def test_main_takes_the_model_directory(example: ModuleType, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    windows: list[Any] = []

    class Closing(example.ChatWindow):  # type: ignore[name-defined, misc]
        def _poll(self) -> None:
            super()._poll()
            if self.status.cget("text") == "Ready":
                windows.append(self)
                self.root.destroy()

    monkeypatch.setattr(example, "ChatWindow", Closing)
    monkeypatch.setattr(sys, "argv", ["chat_window.py", str(model_dir)])
    example.main()
    assert windows
    assert not chat_threads()
