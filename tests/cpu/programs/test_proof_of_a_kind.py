"""Tests that a kind of three files is compiled, stored, inspected, planned, verified and served by the code of the others."""

import httpx
import numpy as np
import openvino as ov
import pytest
from click.testing import CliRunner
from openvino import opset13 as ops
from support.server.served import serving

from staticllm.cli import cli
from staticllm.server.models.served import model_spec


@pytest.fixture
def folder(tmp_path):
    frames = ops.parameter([1, 8, -1], np.float32)
    weights = np.random.default_rng(1).standard_normal((4, 8), np.float32)
    summed = ops.reduce_sum(ops.tanh(ops.matmul(ops.constant(weights), frames, False, False)), np.array([2]))
    summed.output(0).set_names({"features"})
    frames.output(0).set_names({"frames"})
    (tmp_path / "model").mkdir()
    ov.save_model(ov.Model([summed], [frames]), str(tmp_path / "model/openvino_model.xml"), compress_to_fp16=False)
    return tmp_path / "model"


def test_the_commands(folder, tmp_path):
    for arguments, text in {
        ("inspect",): "kind      sound",
        ("plan", "--json"): '"buffers": ',
        ("plan", "--measured"): "SoundVariant(rows=64)",
        ("verify",): "the same as the original",
        ("compile", "--verify", "--export-blob", str(tmp_path / "set")): "verified: 2 calls, cosine 1.000000",
    }.items():
        result = CliRunner().invoke(cli, [arguments[0], str(folder), *arguments[1:]])
        assert text in result.output, result.output
        assert result.exit_code == 0, result.output


def test_it_is_served(folder):
    with serving([model_spec(f"ears={folder}")]) as served:
        (listed,) = httpx.get(served.url + "/v1/models", timeout=60).json()["data"]
        assert (listed["type"], listed["status"]) == ("sound", "loaded")
        refused = httpx.post(served.url + "/v1/chat/completions", json={"model": "ears", "messages": []}, timeout=60)
        assert refused.status_code == 400
