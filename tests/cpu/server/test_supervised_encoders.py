"""Tests encoders of `staticllm serve --supervise`, which have worker processes, and of `--daemon`, which run in the server."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import httpx
import numpy as np
import psutil
import pytest
from support.attach.daemons import wait_for
from support.encoders.encoder_directories import a_directory
from support.server.served import serving

from staticllm.pipelines.embedding.pool.worker_instance import WorkerInstance
from staticllm.server.models.served import model_spec
from tests.support.inside import driver_of

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals end the processes here")


def two_embedders(tmp_path):
    specs = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        specs.append(model_spec(f"{name}={a_directory(tmp_path / name)}"))
    return specs


def embedded(served, name, texts):
    found = httpx.post(served.url + "/v1/embeddings", json={"model": name, "input": texts}, timeout=120)
    assert found.status_code == 200, found.text
    return [each["embedding"] for each in found.json()["data"]]


def are_close(vectors, expected):
    """Return whether vectors are the same; larger calls, in which texts run beside others, round otherwise."""
    return np.allclose(vectors, expected, rtol=0, atol=1e-6)


def test_with_the_daemon_encoders_run_in_the_server_which_the_log_says_once(run_folder, tmp_path, caplog):
    before = set(psutil.Process().children())
    with (
        caplog.at_level("WARNING", logger="staticllm.server"),
        serving(two_embedders(tmp_path), runs_in="daemon") as served,
    ):
        for name in ("one", "two", "one"):
            embedded(served, name, "a")
            assert served.state.hub.models[name].home is None
        assert set(psutil.Process().children()) <= before
    told = [record.getMessage() for record in caplog.records if "--daemon" in record.getMessage()]
    assert [line.split(" ")[0] for line in told] == ["'one'", "'two'"]


def test_a_worker_that_is_killed_while_it_loads_for_the_first_time_does_not_end_the_server(
    run_folder, tmp_path, monkeypatch, caplog
):
    start, killed = WorkerInstance._start, []

    def start_and_kill_the_first(instance):
        process = start(instance)
        if not killed:
            killed.append(process.pid)
            process.kill()
        return process

    monkeypatch.setattr(WorkerInstance, "_start", start_and_kill_the_first)
    with serving(two_embedders(tmp_path), runs_in="worker") as served:
        assert len(embedded(served, "one", "a")) == 1
        assert killed
    assert "was not loaded" not in caplog.text, "that would have ended the server"


@pytest.mark.slow
def test_supervised_embedders_outlive_their_workers(run_folder, tmp_path):
    """Six times a worker is killed under load, and then until it is given up: texts are embedded right, nothing is left over."""
    texts, ends = ["a", "b c", "d e f g", "one two three"], threading.Event()
    wrong, answers, body = [], [], {"model": "one", "input": texts}
    others = set(psutil.Process().children())
    with serving(two_embedders(tmp_path), runs_in="worker") as served:
        expected = embedded(served, "one", texts)
        assert len(embedded(served, "two", "a")) == 1
        worker_ids = {name: driver_of(served.pipeline(name)).pool.devices[0].instance for name in ("one", "two")}
        other = worker_ids["two"].pid

        def keep_asking():
            while not ends.is_set():
                found = httpx.post(served.url + "/v1/embeddings", json=body, timeout=120)
                answers.append(found.status_code)
                if found.status_code == 503:  # a text with which two workers ended
                    assert found.json()["error"]["code"] == "process_lost"
                    assert found.headers["Retry-After"]
                elif found.status_code != 200 or not are_close(
                    [each["embedding"] for each in found.json()["data"]], expected
                ):
                    wrong.append(found.text)

        clients = [threading.Thread(target=keep_asking, daemon=True) for _ in range(4)]
        for client in clients:
            client.start()
        for _ in range(6):
            pid, before = worker_ids["one"].pid, answers.count(200)
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda pid=pid: worker_ids["one"].pid != pid, 120)
            wait_for(lambda before=before: answers.count(200) > before + len(clients), 120)
        assert are_close(embedded(served, "one", texts), expected)
        ends.set()
        for client in clients:
            client.join(120)
        assert not wrong
        old = served.pipeline("one")
        asker = threading.Thread(target=lambda: httpx.post(served.url + "/v1/embeddings", json=body, timeout=120))
        asker.start()
        until = time.monotonic() + 300
        while old.is_usable and time.monotonic() < until:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker_ids["one"].pid, signal.SIGKILL)
            time.sleep(0.05)
        asker.join()
        assert embedded(served, "one", texts) == expected
        assert served.pipeline("one") is not old, "the other model goes on"
        assert worker_ids["two"].pid == other, "the other model goes on"
        assert len(set(psutil.Process().children()) - others) == 2
    wait_for(lambda: set(psutil.Process().children()) <= others, 20)
