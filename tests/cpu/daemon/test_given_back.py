"""The daemon and the server give the programs of a model back when they drop it, without the garbage collector."""

import sys
import tempfile
import time
from pathlib import Path

import pytest
from support.attach.daemons import daemon_thread
from support.helpers import EXACT, SHORT, tokens_of
from support.server.held import check_gives_back, programs

from staticllm import ClosedError, StaticLLMPipeline, demo_model_path
from staticllm.daemon.packed.model import PackedModel
from tests.support.attach.packed_programs import Program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts threads and files in /proc")


def test_a_language_model_that_the_daemon_drops(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="given") as folder, daemon_thread(monkeypatch, Path(folder)) as daemon:

        def use():
            with StaticLLMPipeline(demo_model_path(), "CPU", daemon=True, **SHORT) as pipe:
                tokens_of(pipe, count=3)
                pipe.generate("Hello", max_new_tokens=3, num_beams=2, stop_strings={"zz"})
            end = time.monotonic() + 20
            while daemon.models.served() and time.monotonic() < end:
                daemon.models.drop_idle(0)
                time.sleep(0.02)
            assert not daemon.models.served()

        check_gives_back(use, use, use)


def test_a_packed_model():
    xml = demo_model_path() / "openvino_model.xml"

    def use():
        model = PackedModel(xml, "CPU", EXACT | SHORT)
        request = model.open()
        request.infer(Program(request).inputs(1, 5))
        request.close()
        model.close()
        with pytest.raises(ClosedError):
            model.get_property("NETWORK_NAME")
        kept.append(model)

    kept: list[PackedModel] = []
    check_gives_back(use, use, use)
    assert len(kept) == 3


def test_a_model_that_the_server_unloads():
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    httpx = pytest.importorskip("httpx")
    from support.server.served import serving

    others = len(programs())
    with serving(idle_unload=0.2) as served:
        hub = served.state.hub

        def use():
            body = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
            assert httpx.post(served.url + "/v1/chat/completions", json=body, timeout=120).status_code == 200
            end = time.monotonic() + 60
            while (hub.loaded or len(programs()) > others) and time.monotonic() < end:
                time.sleep(0.05)  # closing goes on in a thread after the model has left the list
            assert not hub.loaded

        check_gives_back(use, use, use)
