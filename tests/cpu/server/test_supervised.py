"""Tests `staticllm serve --supervise` and `--daemon`: models in other processes, and what happens when these end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import httpx
import psutil
import pytest
from support.attach.daemons import daemon_process, wait_for
from support.server.served import serving

from staticllm.compiler_passes.artifacts.crashes import num_crashes
from staticllm.daemon.process import lifetime
from staticllm.pipelines.diagnostics.reference import EXACT
from staticllm.server.models.homes import WorkerHome
from staticllm.wire import endpoint

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals end the processes here")
BODY = {"messages": [{"role": "user", "content": "What is an NPU?"}], "temperature": 0, "max_tokens": 12}
LONG = {**BODY, "stream": True, "max_tokens": 3900, "ignore_eos": True}
PROPERTIES = {
    **EXACT,
    "PROGRAMS": "shared",
    "MIN_RESPONSE_LEN": 4000,
}  # long answers are still running when the worker is killed


@contextlib.contextmanager
def supervised(**settings):
    with serving(runs_in="worker", properties={**PROPERTIES, **settings.pop("properties", {})}, **settings) as served:
        yield served


def worker_of(served, name="demo"):
    home = served.state.hub.models[name].home
    wait_for(lambda: home.pid is not None and psutil.pid_exists(home.pid), 120)  # not while one replaces another
    return psutil.Process(home.pid)


def ask(url, **more):
    return httpx.post(url + "/v1/chat/completions", json={**BODY, **more}, timeout=60)


def text_of(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def events_of(response):
    lines = [line for line in response.iter_lines() if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


@contextlib.contextmanager
def streaming(url, body=LONG):
    """Begin a long answer, and yield the response and its first line."""
    with httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=60) as response:
        yield response


def test_a_killed_worker_ends_its_answers_with_an_error_and_the_next_is_served(run_folder):
    with serving(properties=PROPERTIES) as plain:
        expected = text_of(ask(plain.url))
    with supervised() as served:
        assert text_of(ask(served.url)) == expected
        first = worker_of(served)
        whole, path = [], served.url + "/v1/chat/completions"
        with httpx.Client(timeout=60) as client:  # made before: that takes long on a busy machine
            waiter = threading.Thread(target=lambda: whole.append(client.post(path, json={**LONG, "stream": False})))
            waiter.start()
            wait_for(lambda: served.state.hub.models["demo"].admission.num_running == 1, 60)
            time.sleep(0.2)  # it is in the worker
            with client.stream("POST", path, json=LONG) as response:
                lines = response.iter_lines()
                next(line for line in lines if '"content":"' in line)
                first.kill()
                *_, error, done = [line for line in lines if line and not line.startswith(":")]
            waiter.join()
        assert done == "data: [DONE]"
        assert json.loads(error[6:])["error"]["code"] == "process_lost"
        assert whole[0].status_code == 503
        assert whole[0].headers["Retry-After"] == "1"
        assert whole[0].json()["error"]["code"] == "process_lost"
        assert text_of(ask(served.url)) == expected
        second = worker_of(served)
        assert second.pid != first.pid
        wait_for(lambda: served.state.lifecycle.num_requests == 0)
        assert served.state.hub.models["demo"].admission.num_running == 0
    assert not second.is_running()
    assert list(run_folder.iterdir()) == []


def test_a_worker_is_started_again_before_anybody_asks(run_folder):
    with supervised() as served:
        first = worker_of(served).pid
        os.kill(first, signal.SIGKILL)
        model = served.state.hub.models["demo"]
        wait_for(lambda: model.home.pid not in (None, first) and not model.is_lost, 120)
        served.wait_until_ready()


def test_a_worker_that_is_killed_while_it_loads_for_the_first_time_does_not_end_the_server(
    run_folder, monkeypatch, caplog
):
    start, killed = WorkerHome.start, []

    def start_and_kill_the_first(home):
        start(home)
        if not killed:
            killed.append(home.pid)
            os.kill(home.pid, signal.SIGKILL)

    monkeypatch.setattr(WorkerHome, "start", start_and_kill_the_first)
    with supervised() as served:
        assert text_of(ask(served.url))
        assert worker_of(served).pid not in killed
    assert "was not loaded" not in caplog.text, "that would have ended the server"


def test_metrics_and_the_feed_work_while_a_worker_is_lost(run_folder):
    with supervised() as served:
        served.state.hub._is_closed = True  # nothing is loaded again
        worker_of(served).kill()
        wait_for(lambda: served.state.hub.models["demo"].is_lost)
        assert "staticllm_waiting_requests" in httpx.get(served.url + "/metrics", timeout=60).text
        feed = httpx.get(served.url + "/api/scheduler", timeout=60).json()
        assert feed["totals"] is None
        assert feed["models"][0]["status"] == "unloaded"
        assert httpx.get(served.url + "/v1/models", timeout=60).status_code == 200
        assert ask(served.url).status_code == 503


def test_unloading_ends_the_worker(run_folder):
    with supervised(idle_unload=0.2) as served:
        assert text_of(ask(served.url))
        process = worker_of(served)
        wait_for(lambda: served.pipeline() is None and not process.is_running(), 30)
        assert text_of(ask(served.url))  # in another one


def test_a_blob_set_that_crashed_twice_is_not_used_again(run_folder, tmp_path, caplog):
    cache = tmp_path / "cache"
    with supervised(properties={"CACHE_DIR": str(cache)}) as served:
        expected = text_of(ask(served.url))
    (folder,) = [each for each in cache.iterdir() if each.is_dir()]
    assert num_crashes(folder) == 0
    with supervised(properties={"CACHE_DIR": str(cache)}) as served:
        for number in (0, 1, 2):
            assert text_of(ask(served.url)) == expected
            process = worker_of(served)
            os.kill(
                process.pid, signal.SIGKILL if number == 0 else signal.SIGSEGV
            )  # the first says nothing about the blobs
            wait_for(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)  # noqa: B023
            assert text_of(ask(served.url)) == expected
            assert num_crashes(folder) == number
        assert "are in quarantine" in caplog.text
        assert str(folder) in caplog.text
        before = (folder / "manifest.json").read_bytes()
        os.kill(worker_of(served).pid, signal.SIGSEGV)
        assert text_of(ask(served.url)) == expected
        assert num_crashes(folder) == 2, "the set was used again"
    assert (folder / "manifest.json").read_bytes() == before


def test_a_blob_path_in_quarantine_is_refused_with_the_remedy(tmp_path):
    import staticllm
    from staticllm.compiler_passes.artifacts.crashes import count_crash

    options = {**PROPERTIES, "MAX_PROMPT_LEN": 64, "BLOB_PATH": str(tmp_path / "set")}
    with staticllm.StaticLLMPipeline(staticllm.demo_model_path(), "CPU", EXPORT_BLOB=True, **options):
        pass
    assert count_crash(tmp_path / "set", "SIGSEGV") == 1
    with staticllm.StaticLLMPipeline(staticllm.demo_model_path(), "CPU", **options):
        pass
    assert count_crash(tmp_path / "set", "SIGSEGV") == 2
    with pytest.raises(staticllm.BlobError, match="in quarantine: remove the folder"):
        staticllm.StaticLLMPipeline(staticllm.demo_model_path(), "CPU", **options)
    with staticllm.StaticLLMPipeline(staticllm.demo_model_path(), "CPU", EXPORT_BLOB=True, **options):
        pass  # a new set has not crashed
    assert num_crashes(tmp_path / "set") == 0


def test_a_model_that_a_worker_cannot_load_says_why(run_folder):
    from staticllm.errors import StaticLLMError
    from staticllm.server.models.served import demo_spec, load_pipeline

    home = WorkerHome("demo", lambda: None)
    with pytest.raises(StaticLLMError, match="NO_SUCH"):
        load_pipeline(demo_spec(), "CPU", {"NO_SUCH": 1}, lambda event: None, home)
    home.close()
    assert list(run_folder.iterdir()) == []


def test_a_worker_that_does_not_start_is_one_line(run_folder, monkeypatch):
    from staticllm.errors import DeviceError
    from staticllm.server.models.served import demo_spec, load_pipeline

    monkeypatch.setenv("STATICLLM_DAEMON_COMMAND", json.dumps([sys.executable, "-c", "raise SystemExit(7)"]))
    home = WorkerHome("demo", lambda: None)
    with pytest.raises(DeviceError, match="cannot be started: it ended with exit code 7"):
        load_pipeline(demo_spec(), "CPU", PROPERTIES, lambda event: None, home)
    home.close()


def test_a_worker_that_is_silent_while_it_starts_is_waited_for(run_folder, monkeypatch):
    looks = []

    def listens(folder):
        looks.append(folder)
        if len(looks) < 3:
            raise endpoint.SilentError("it has not answered")
        return True

    monkeypatch.setattr(endpoint, "listens", listens)
    monkeypatch.setenv("STATICLLM_DAEMON_COMMAND", json.dumps([sys.executable, "-c", "import time; time.sleep(60)"]))
    home = WorkerHome("demo", lambda: None)
    home.start()
    assert looks == [home.folder] * 3
    home.close()


def test_models_of_the_daemon_are_shared_with_other_programs_and_loaded_again(run_folder, monkeypatch):
    import staticllm

    with daemon_process(monkeypatch, run_folder) as process:
        with serving(runs_in="daemon", properties=PROPERTIES) as served:
            expected = text_of(ask(served.url))
            with staticllm.StaticLLMPipeline(staticllm.demo_model_path(), "CPU", daemon=True, **PROPERTIES):
                (model,) = lifetime.status(run_folder)["models"]
                assert model["users"] == 2
            long = {"max_tokens": 400, "ignore_eos": True}
            whole = text_of(ask(served.url, **long))
            with streaming(served.url, {**BODY, **long, "stream": True}) as response:
                lines = response.iter_lines()
                first = next(line for line in lines if '"content":"' in line)
                process.kill()
                *rest, done = [line for line in lines if line and not line.startswith(":")]
            assert done == "data: [DONE]"
            assert "process_lost" not in "".join(rest)
            deltas = [json.loads(line[6:])["choices"] for line in (first, *rest)]
            assert "".join(choice[0]["delta"].get("content") or "" for choice in deltas if choice) == whole
            process.wait()
            assert text_of(ask(served.url)) == expected  # in the daemon that the answer started
        found = lifetime.status(run_folder)
        assert found["pid"] != process.pid and found["clients"] == []  # it goes on without the server
        lifetime.stop(run_folder)


@pytest.mark.parametrize("option", ["--supervise", "--daemon"])
def test_the_options_of_the_command(run_folder, option):
    command = [sys.executable, "-m", "staticllm", "serve", "--port", "0", option, "-p", "PROGRAMS=shared"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    workers = []
    try:
        url = process.stdout.readline().split()[0].removesuffix("/v1")
        assert text_of(ask(url))
        workers = psutil.Process(process.pid).children() if option == "--supervise" else []
        assert len(workers) == (option == "--supervise")
        process.kill()  # without a chance to end its worker
        process.wait()
        wait_for(lambda: not any(worker.is_running() for worker in workers), 20)
    finally:
        process.kill()
        process.communicate()
        lifetime.stop(run_folder)


def test_both_options_together_are_refused(run_folder):
    command = [sys.executable, "-m", "staticllm", "serve", "--supervise", "--daemon"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "leave one of them out" in result.stderr


class Clients:
    """Clients that stream or ask, one request after the other, and count how each ended."""

    def __init__(self, url, count):
        self.ends, self.wrong = Counter(), []
        self._url, self._is_over = url, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self, number):
        body = {**BODY, "max_tokens": 60, "ignore_eos": True, "stream": number % 2 == 0}
        with httpx.Client(timeout=60) as client:
            while not self._is_over.is_set():
                try:
                    self.ends[self._ask(client, body)] += 1
                except Exception as error:
                    self.wrong.append(repr(error))

    def _ask(self, client, body):
        path = self._url + "/v1/chat/completions"
        if not body["stream"]:
            response = client.post(path, json=body)
            if response.status_code == 200:
                assert response.json()["usage"]["completion_tokens"] == 60
                return "finished"
            assert response.status_code == 503, response.text
            assert response.headers["Retry-After"], response.text
            return response.json()["error"]["code"]
        with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                response.read()
                assert response.status_code == 503, response.text
                return response.json()["error"]["code"]
            events = events_of(response)
        if "error" in events[-1]:
            return events[-1]["error"]["code"]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        return "finished"

    def stop(self):
        self._is_over.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a client hangs"


@pytest.mark.slow
def test_a_worker_that_is_killed_six_times_under_load_leaves_nothing(run_folder):
    here = psutil.Process()
    others = set(here.children(recursive=True))  # of tests before this one
    with supervised() as served:
        text_of(ask(served.url))
        before = here.num_fds(), len(here.net_connections("unix"))
        blocks = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()  # noqa: PTH112, PTH208
        model, clients, pids = served.state.hub.models["demo"], Clients(served.url, 8), {None}
        try:
            for _ in range(6):
                wait_for(lambda: model.home.pid not in pids and not model.is_lost, 120)
                finished = clients.ends["finished"]
                wait_for(lambda: clients.ends["finished"] > finished, 120)  # noqa: B023 - the next requests are served
                pids.add(model.home.pid)
                os.kill(model.home.pid, signal.SIGKILL)
            finished = clients.ends["finished"]
            wait_for(lambda: clients.ends["finished"] > finished + 8, 120)
        finally:
            clients.stop()
        assert not clients.wrong, clients.wrong
        assert set(clients.ends) <= {"finished", "process_lost"}, clients.wrong
        assert clients.ends["process_lost"]
        assert len(pids) == 7
        print(dict(clients.ends))
        assert text_of(ask(served.url))
        wait_for(lambda: served.state.lifecycle.num_requests == 0)
        assert (model.num_users, model.admission.num_running, model.admission.num_waiting) == (0, 0, 0)
        assert len(set(here.children(recursive=True)) - others) == 1  # the worker that runs now
        wait_for(lambda: (here.num_fds(), len(here.net_connections("unix"))) <= (before[0] + 2, before[1]), 30)
        assert not [thread for thread in threading.enumerate() if thread.name == "staticllm-remote"][1:]
    assert list(run_folder.iterdir()) == []
    assert not set(here.children(recursive=True)) - others
    assert (set(os.listdir("/dev/shm")) if blocks else set()) <= blocks  # noqa: PTH208
