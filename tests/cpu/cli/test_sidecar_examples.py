"""Tests the examples that start a server of their own: in Python, in JavaScript, and the window."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

for package in ("fastapi", "uvicorn", "sse_starlette", "prometheus_client"):
    pytest.importorskip(package)

import psutil  # noqa: E402
from support.attach.daemons import wait_for  # noqa: E402

EXAMPLES = Path(__file__).parents[3] / "examples"
SECONDS = 120
CLIENTS = {
    "python": [sys.executable, str(EXAMPLES / "sidecar_client.py")],
    "node": ["node", str(EXAMPLES / "sidecar_client.mjs")],
}
posix = pytest.mark.skipif(os.name == "nt", reason="signals end the processes here")


@pytest.fixture
def client(request, monkeypatch, tmp_path):
    """The command of an example, which starts the server of this environment."""
    if request.param == "node" and shutil.which("node") is None:
        pytest.skip("node is missing: apt-get install nodejs")
    monkeypatch.setenv("STATICLLM", f"{sys.executable} -m staticllm")
    monkeypatch.setenv("STATICLLM_RUNTIME_DIR", str(tmp_path / "r"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return CLIENTS[request.param]


both = pytest.mark.parametrize("client", CLIENTS, indirect=True)


def load_example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@both
def test_a_client_prints_the_answer_and_leaves_nothing(client, tmp_path):
    result = subprocess.run(
        [*client, "Hello"], capture_output=True, encoding="utf-8", timeout=SECONDS, check=False, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert not result.stderr, result.stderr
    assert len(result.stdout.strip()) > 10
    assert [each.name for each in tmp_path.iterdir() if each.name != "r"] == []


@posix
@both
def test_a_server_ends_with_a_client_that_is_killed(client, tmp_path):
    process = subprocess.Popen(client, stdout=subprocess.PIPE)
    try:
        wait_for(lambda: psutil.Process(process.pid).children(), 30)
        (server,) = psutil.Process(process.pid).children()
        process.stdout.read(1)  # the answer has begun
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_for(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, 30)
    finally:
        process.kill()
        process.communicate()


@both
def test_a_server_that_cannot_start_is_said(client, monkeypatch):
    code = "import sys; sys.exit('Error: no model here')"
    wrapped = [*client]
    if client[0] == "node":
        monkeypatch.setenv("STATICLLM", "no-such-command-anywhere")
    else:
        patch = "import sys, sidecar_client as s; s.COMMAND = [sys.executable, '-c', sys.argv[1]]; s.Sidecar()"
        monkeypatch.syspath_prepend(str(EXAMPLES))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")]))
        wrapped = [sys.executable, "-c", patch, code]
    result = subprocess.run(wrapped, capture_output=True, encoding="utf-8", timeout=SECONDS, check=False)
    assert result.returncode != 0
    assert ("no-such-command-anywhere" if client[0] == "node" else "no model here") in result.stderr


@posix
def test_a_crash_of_the_model_is_an_error_and_the_next_question_is_answered(monkeypatch, tmp_path):
    monkeypatch.setenv("STATICLLM_RUNTIME_DIR", str(tmp_path / "r"))
    sidecar = load_example("sidecar_client").Sidecar("--supervise", "-p", "PROGRAMS=shared")
    try:
        question = [{"role": "user", "content": "What is an NPU?"}]
        (worker,) = psutil.Process(sidecar.process.pid).children()  # before the answer, which ends soon
        answer = sidecar.chat(question, max_tokens=900, ignore_eos=True)
        next(answer)
        worker.kill()
        with pytest.raises(RuntimeError, match="send it again"):
            list(answer)
        assert "".join(sidecar.chat(question, max_tokens=12))
        with pytest.raises(RuntimeError, match="'no_such'"):
            list(sidecar.chat(question, no_such=1))
    finally:
        sidecar.close()


def test_the_clients_are_short_and_need_no_package():
    text = (EXAMPLES / "sidecar_client.py").read_text(encoding="utf-8")
    imported = [line.split()[1].split(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))]
    assert set(imported) <= sys.stdlib_module_names
    assert len(text.splitlines()) <= 60
    script = (EXAMPLES / "sidecar_client.mjs").read_text(encoding="utf-8")
    modules = [line.split('"')[-2] for line in script.splitlines() if line.startswith("import ")]
    assert all(name.startswith("node:") for name in modules)
    assert len(script.splitlines()) <= 60


DRIVE = """
import sys, time, tkinter as tk
from chat_window_sidecar import SidecarWindow
root = tk.Tk()
window = SidecarWindow(root)
def wait(condition):
    end = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < end, window.history.get("1.0", "end")
        root.update()
        time.sleep(0.01)
is_ready = lambda: str(window.send_button.cget("state")) == "normal"
wait(is_ready)
for question in ("Hello", "What is an NPU?"):
    window.entry.insert(0, question)
    window.send()
    wait(is_ready)
print(window.history.get("1.0", "end-1c"))
root.after(10, lambda: ([root.after_cancel(each) for each in root.tk.splitlist(root.tk.call("after", "info"))], root.destroy()))
window.run()
"""


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="the virtual screen is X11's")
def test_the_window_talks_to_its_server(monkeypatch, tmp_path):
    pytest.importorskip("tkinter")
    if shutil.which("Xvfb") is None:
        pytest.skip("Xvfb is missing: apt-get install xvfb")
    monkeypatch.setenv("STATICLLM_RUNTIME_DIR", str(tmp_path / "r"))
    reader, writer = os.pipe()
    command = ["Xvfb", "-displayfd", str(writer), "-screen", "0", "800x600x24", "-nolisten", "tcp"]
    screen = subprocess.Popen(command, pass_fds=[writer], stderr=subprocess.DEVNULL)
    os.close(writer)
    try:
        with os.fdopen(reader) as pipe:
            display = pipe.readline().strip()
        environment = {
            **os.environ, "DISPLAY": f":{display}",
            "PYTHONPATH": os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip
        result = subprocess.run(
            [sys.executable, "-c", DRIVE],
            capture_output=True,
            encoding="utf-8",
            timeout=SECONDS,
            check=False,
            env=environment,
        )
    finally:
        screen.terminate()
        screen.wait()
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.split("\nHello\n")[1].split("\nWhat is an NPU?\n")
    assert len(first.strip()) > 5
    assert len(second.strip()) > 5
