"""Fixtures of the daemon's tests: a daemon with low limits, an honest client, and programs on packed models."""

from __future__ import annotations

import numpy as np
import openvino as ov
import openvino.opset13 as op
import pytest

from staticllm.daemon.packed.model import PackedModel
from staticllm.daemon.sharing.device_scheduler import ClientId
from staticllm.wire.messages import Kind
from tests.support.attach.daemons import RawClient, daemon_thread
from tests.support.attach.packed_programs import EXACT, SHORT, Original, Program

ROWS = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.xml"
    rows = op.parameter([-1, 8], np.float32, name="rows")
    weights = op.constant(np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32))
    ov.save_model(ov.Model([op.matmul(rows, weights, False, False)], [rows], "m"), path, compress_to_fp16=False)
    return path


@pytest.fixture
def expected(plain_model):
    return ov.Core().compile_model(str(plain_model), "CPU")(ROWS)[0]


@pytest.fixture
def daemon(monkeypatch, tmp_path):
    with daemon_thread(monkeypatch, tmp_path / "run", clients=3, models=2, requests=4, block_bytes=1 << 20) as daemon:
        yield daemon


@pytest.fixture
def honest(daemon, plain_model, expected):
    """A client whose calls must go on, whatever others do."""
    with RawClient() as client:
        handle = client.model(plain_model).body["model"]
        with client.request(handle) as request:
            (found,) = request.infer(ROWS)
            np.testing.assert_array_equal(found, expected)
            yield request
            (found,) = request.infer(ROWS)
            np.testing.assert_array_equal(found, expected)
            assert request.ask(Kind.PING).kind is Kind.OK


@pytest.fixture(scope="module")
def loaded(model_path):
    """A function from a name to our model and to the original, compiled once."""
    known = {}

    def load(name):
        if name not in known:
            xml = model_path(name) / "openvino_model.xml"
            known[name] = PackedModel(xml, "CPU", EXACT | SHORT), ov.Core().compile_model(str(xml), "CPU", EXACT)
        return known[name]

    yield load
    for model, _ in known.values():
        model.close()


@pytest.fixture
def program_on(loaded):
    """A function from a model's name to a program on our request and on an original one."""
    requests = []

    def program(name, seed=0):
        model, compiled = loaded(name)
        requests.append(model.open(ClientId(1)))
        return Program(requests[-1], Original(compiled), seed=seed)

    yield program
    for request in requests:
        request.close()
