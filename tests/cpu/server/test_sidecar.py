"""Tests `staticllm serve` beside an application: how it tells that it is ready, and when it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time

import httpx
import psutil
import pytest
from support.attach.daemons import wait_for
from support.command_line import in_here

SERVE = [sys.executable, "-m", "staticllm", "serve"]
posix = pytest.mark.skipif(os.name == "nt", reason="Windows passes no descriptors and no signals")


@contextlib.contextmanager
def started(folder, *arguments, **more):
    environment = {**os.environ, "STATICLLM_RUNTIME_DIR": str(folder / "run")}
    process = subprocess.Popen(
        [*SERVE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **more
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ready_in(path, process):
    wait_for(lambda: path.exists() or process.poll() is not None, 60)
    assert process.poll() is None, process.stderr.read()
    return json.loads(path.read_text())


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@posix
def test_the_ready_file_says_where_it_serves_and_is_gone_at_the_end(tmp_path):
    path = tmp_path / "ready.json"
    path.write_text("of a server that was killed")
    with started(tmp_path, "--port", "0", "--random-key", "--ready-file", str(path)) as process:
        wait_for(lambda: not path.exists() or path.read_text().startswith("{"), 60)
        ready = ready_in(path, process)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert ready["pid"] == process.pid
        assert ready["models"] == ["demo"]
        assert len(ready["key"]) >= 32
        assert ready["url"] == f"http://127.0.0.1:{ready['port']}/v1"
        assert httpx.get(ready["url"] + "/models", timeout=60).status_code == 401
        headers = {"Authorization": f"Bearer {ready['key']}"}
        models = httpx.get(ready["url"] + "/models", headers=headers, timeout=60).json()["data"]
        assert [model["status"] for model in models] == ["loaded"]  # it serves, instead of only listening
        process.terminate()
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0
        assert ready["key"] not in out + err
    assert not path.exists()
    assert not list((tmp_path / "run" / "ports").iterdir())
    assert [each for each in tmp_path.iterdir() if each.name.startswith(".ready")] == []


@posix
def test_the_ready_descriptor_gets_one_line_and_is_closed(tmp_path):
    reader, writer = os.pipe()
    with started(tmp_path, "--port", "0", "--lazy", "--ready-fd", str(writer), pass_fds=[writer]) as process:
        os.close(writer)
        with os.fdopen(reader) as pipe:
            lines = pipe.read().splitlines()  # ends, although the server goes on
        assert len(lines) == 1
        assert process.poll() is None
        ready = json.loads(lines[0])
        assert ready["key"] is None
        assert httpx.get(ready["url"] + "/models", timeout=60).status_code == 200


@posix
def test_an_application_that_has_ended_is_noticed_at_the_descriptor(tmp_path):
    reader, writer = os.pipe()
    with started(tmp_path, "--port", "0", "--lazy", "--ready-fd", str(writer), pass_fds=[writer]) as process:
        os.close(writer)
        os.close(reader)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "cannot be written" in err.splitlines()[-1]
    assert "Traceback" not in err


def test_it_ends_with_its_parent(tmp_path):
    path = tmp_path / "ready.json"
    code = "import subprocess, sys, time, os; subprocess.Popen(sys.argv[1:] + [str(os.getpid())]); time.sleep(600)"
    arguments = [*SERVE, "--port", "0", "--lazy", "--ready-file", str(path), "--parent-pid"]
    parent = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], env={**os.environ, "STATICLLM_RUNTIME_DIR": str(tmp_path / "run")}
    )
    try:
        server = psutil.Process(ready_in(path, parent)["pid"])
        parent.kill()
        parent.wait()
        wait_for(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, 30)
        assert not path.exists()
    finally:
        parent.kill()
        parent.wait()


def test_a_watch_reports_the_end_once_and_can_be_closed():
    from staticllm.children.parent_watch import ParentWatch

    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ends = []
    watch = ParentWatch(process.pid, lambda: ends.append(time.monotonic()))
    unused = ParentWatch(process.pid, lambda: ends.append("closed before"))
    unused.close()
    assert not ends
    process.communicate(b"\n")
    wait_for(lambda: ends, 30)
    watch.close()
    assert len(ends) == 1


@posix
def test_a_second_server_at_a_port_is_told_who_has_it(tmp_path):
    path, port = tmp_path / "ready.json", str(free_port())
    with started(tmp_path, "--port", port, "--lazy", "--ready-file", str(path)) as first:
        ready = ready_in(path, first)
        for more in ([], ["--ready-file", str(path)]):
            with started(tmp_path, "--port", port, "--lazy", *more) as second:
                out, err = second.communicate(timeout=60)
            assert second.returncode == 3
            assert not out
            assert err.count("\n") == 1
            assert f"http://127.0.0.1:{port}" in err
            assert f"process {first.pid}" in err
            assert "--port" in err
        assert json.loads(path.read_text()) == ready  # the second one left the first one's file
        first.send_signal(signal.SIGKILL)
        first.wait()
    with started(
        tmp_path, "--port", port, "--lazy", "--ready-file", str(path)
    ) as third:  # a killed server blocks nothing
        wait_for(lambda: path.exists() and json.loads(path.read_text())["pid"] == third.pid, 60)


def test_a_port_of_another_program_has_the_same_exit_code(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with started(tmp_path, "--port", str(other.getsockname()[1]), "--lazy") as process:
            _, err = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "another process has the port" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, code, words",
    [
        (["--random-key"], 2, "--random-key goes with"),
        (["--ready-file", "no/such/folder/ready"], 1, "--ready-file"),
        (["--ready-file", "."], 1, "is a folder"),
        (["--parent-pid", "4194305"], 1, "there is no such process"),
        pytest.param(["--ready-fd", "4077"], 1, "is not open", marks=posix),
        pytest.param(["--ready-fd", "1000000000000"], 1, "is not open", marks=posix),
    ],
)
def test_mistakes_get_one_line(run_folder, arguments, code, words):
    done = in_here("serve", "--port", "0", "--lazy", *arguments)
    assert done.returncode == code
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
