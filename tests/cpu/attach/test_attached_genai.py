"""Programs with GenAI and with transformers, natively and attached: the same answers, and what stays in the program."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from support.models.lora_files import Lora
from support.models.whisper_directory import sound, write_whisper

from staticllm import demo_model_path
from tests.support.attach.attached_programs import daemon_environment, last_json, run


@pytest.fixture(scope="module")
def environment():
    """An environment whose attached programs have a daemon of their own."""
    with daemon_environment() as environment:
        yield environment


GENAI = """
import json, sys
import openvino_genai
from openvino_genai import LLMPipeline
pipe = openvino_genai.LLMPipeline(sys.argv[1], "CPU", INFERENCE_PRECISION_HINT="f32", KV_CACHE_PRECISION="f32")
config = pipe.get_generation_config()
config.max_new_tokens = 16
pieces = []
pipe.generate("What is an NPU?", config, lambda text: pieces.append(text) and None)
pipe.start_chat()
chat = [str(pipe.generate(text, max_new_tokens=12)) for text in ("Hello!", "Who are you?")]
pipe.finish_chat()
print(json.dumps({
    "class": type(pipe).__name__, "is": isinstance(pipe, LLMPipeline), "text": "".join(pieces),
    "again": str(pipe.generate("What is an NPU?", config)), "chat": chat,
}))
"""


def test_a_genai_program_has_its_engine_in_the_daemon(environment):
    found = [last_json(run(environment, "-c", GENAI, demo_model_path(), mode=mode)) for mode in ("off", "require")]
    native, attached = found
    assert (native.pop("class"), attached.pop("class")) == ("LLMPipeline", "StaticLLMPipeline")
    assert attached == native
    assert native["is"]


MORE_GENAI = """
import json, sys
from openvino_genai import Adapter, AdapterConfig, LLMPipeline, draft_model
import openvino_genai as genai
assert "staticllm.pipelines" not in sys.modules
path, order, loras = sys.argv[1], sys.argv[2], sys.argv[3:]
exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
if order == "pipeline":
    LLMPipeline(path, "CPU", **exact)
options = {"max_new_tokens": 12, "ignore_eos": True, "apply_chat_template": False}
adapters = [Adapter(lora) for lora in loras]
pipe = LLMPipeline(path, "CPU", adapters=AdapterConfig(adapters), **exact)
found = [pipe.generate("What is an NPU?", adapters=AdapterConfig(adapters[0], alpha), **options) for alpha in (1.0, 0.25)]
drafted = LLMPipeline(path, "CPU", draft_model=draft_model(path, "CPU", **exact), ATTENTION_BACKEND="PA", **exact)
found.append(drafted.generate("What is an NPU?", num_assistant_tokens=3, **options))
print(json.dumps([type(pipe).__name__, type(drafted).__name__, *map(str, found)]))
"""


@pytest.mark.parametrize("order", ["adapters", "pipeline"])
def test_a_genai_program_has_its_adapters_and_its_draft_model_in_the_daemon(environment, order, tmp_path):
    loras = [Lora(demo_model_path(), ("q_proj", "down_proj"), seed=seed).save(tmp_path / str(seed)) for seed in (1, 2)]
    files = [folder / "adapter_model.safetensors" for folder in loras]
    native, attached = (
        last_json(run(environment, "-c", MORE_GENAI, demo_model_path(), order, *files, mode=mode))
        for mode in ("off", "require")
    )
    assert native[:2] == ["LLMPipeline"] * 2
    assert attached == ["StaticLLMPipeline"] * 2 + native[2:]
    assert native[2] != native[3]


WHISPER = """
import json, sys
import numpy as np
import openvino_genai
from openvino_genai import WhisperPipeline
samples = np.load(sys.argv[2]).tolist()
pipe = openvino_genai.WhisperPipeline(sys.argv[1], "CPU", INFERENCE_PRECISION_HINT="f32")
config = pipe.get_generation_config()
pieces = []
pipe.generate(samples[:8000], config, lambda text: pieces.append(text) and None)
found = pipe.generate(samples, return_timestamps=True, task="translate", language="<|de|>")
tokens = openvino_genai.WhisperPipeline(sys.argv[1], device="CPU").get_tokenizer().encode("were").input_ids.data.tolist()
print(json.dumps({
    "class": type(pipe).__name__, "is": isinstance(pipe, WhisperPipeline), "text": "".join(pieces), "found": str(found),
    "chunks": [[chunk.start_ts, chunk.end_ts, chunk.text] for chunk in found.chunks],
    "language": found.language, "tokens": tokens,
}))
"""


def test_a_genai_program_has_its_speech_model_in_the_daemon(environment, tmp_path):
    """With this seed, no two tokens are so close that the last bits of the features choose."""
    directory = write_whisper(tmp_path / "whisper", seed=2)
    np.save(tmp_path / "sound.npy", sound(2.5, 3))
    native, attached = (
        last_json(run(environment, "-c", WHISPER, directory, tmp_path / "sound.npy", mode=mode))
        for mode in ("off", "require")
    )
    assert (native.pop("class"), attached.pop("class")) == ("WhisperPipeline", "StaticWhisperPipeline")
    for found in (native, attached):
        found["chunks"] = [[round(start, 3), round(end, 3), text] for start, end, text in found["chunks"]]
    assert attached == native
    assert native["is"]
    assert native["text"]
    assert len(native["chunks"]) > 1


OWN_CLASS = """
import json, sys, openvino_genai
class Mine(openvino_genai.WhisperPipeline):
    pass
pipe = Mine(sys.argv[1], "CPU")
print(json.dumps([type(pipe).__name__, isinstance(pipe, openvino_genai.WhisperPipeline), hasattr(pipe, "submit")]))
"""


def test_a_class_of_the_program_that_derives_from_a_speech_pipeline_runs_natively(environment, tmp_path):
    done = run(environment, "-c", OWN_CLASS, write_whisper(tmp_path / "whisper"))
    assert last_json(done) == ["Mine", True, False]
    assert "Mine derives from WhisperPipeline" in done.stderr


def test_a_speech_model_that_the_daemon_does_not_take_runs_natively(environment, tmp_path):
    """Its config has no ``max_target_positions``, which GenAI does not read."""
    directory = write_whisper(tmp_path / "whisper")
    config = json.loads((directory / "config.json").read_text())
    del config["max_target_positions"]
    (directory / "config.json").write_text(json.dumps(config))
    program = (
        "import json, sys, openvino_genai; "
        "print(json.dumps(type(openvino_genai.WhisperPipeline(sys.argv[1], 'CPU')).__name__))"
    )
    done = run(environment, "-c", program, directory)
    assert last_json(done) == "WhisperPipeline"
    assert "max_target_positions" in done.stderr and "WhisperPipeline runs natively" in done.stderr


def test_a_genai_model_that_the_daemon_does_not_take_runs_natively(environment, tmp_path):
    done = run(environment, "-c", GENAI, demo_model_path(), STATICLLM_RUNTIME_DIR=str(tmp_path / ("x" * 120)))
    assert last_json(done)["class"] == "LLMPipeline"
    assert "LLMPipeline runs natively" in done.stderr
    refused = run(environment, "-c", GENAI, demo_model_path(), mode="require", STATICLLM_RUNTIME_DIR="/dev/null/x")
    assert refused.returncode == 1
    assert "set STATICLLM_RUNTIME_DIR" in refused.stderr


IN_MEMORY = """
import json, sys
from pathlib import Path
import numpy as np, openvino as ov
from openvino_genai import LLMPipeline, Tokenizer
xml, weights = (Path(sys.argv[1]) / f"openvino_model.{suffix}" for suffix in ("xml", "bin"))
data = ov.Tensor(np.frombuffer(weights.read_bytes(), np.uint8).copy())
pipe = LLMPipeline(xml.read_text(encoding="utf-8"), data, Tokenizer(sys.argv[1]), "CPU")
print(json.dumps([type(pipe).__name__, str(pipe.generate("Hi", max_new_tokens=4))]))
"""


def test_a_genai_model_in_memory_runs_natively_and_says_why(environment):
    done = run(environment, "-c", IN_MEMORY, demo_model_path())
    assert last_json(done)[0] == "LLMPipeline"
    assert done.stderr.count("a model in memory cannot be sent to the daemon") == 1
    refused = run(environment, "-c", IN_MEMORY, demo_model_path(), mode="require")
    assert refused.stderr.splitlines()[-1].endswith("only used in this program (daemon=False, STATICLLM_ATTACH=auto)")


HINTS = """
import sys, types
from staticllm.attach import hints
loop = '''
class GenerationMixin:
    def _sample(self, processor=lambda: None):
        return self.forward(), self._prefill(), processor()
    def _prefill(self):
        return self.forward()
    def _beam_search(self):
        raise KeyError
    def _contrastive_search(self):
        return self.forward()
'''
model = "class Model(GenerationMixin):\\n    def forward(self):\\n        return wants_last()"

def module(name, code, **names):
    made = types.ModuleType(name)
    vars(made).update(names)
    exec(code, vars(made))
    return made

utils = module("transformers.generation.utils", loop)
Model = module("optimum.intel.openvino.modeling", model, GenerationMixin=utils.GenerationMixin, wants_last=hints.wants_last).Model
hints.attach(utils)
hints.attach(utils)
assert not hints.wants_last()
found = Model()._sample(lambda: [Model().forward(), Model()._contrastive_search(), hints.wants_last(), Model()._sample()])
expected = sys.argv[1] == "1"
assert found == (expected, expected, [False, False, False, (expected, expected, None)]), found
try:
    Model()._beam_search()
except KeyError:
    pass
assert not hints.wants_last() and not Model()._prefill()
print("[]")
"""


@pytest.mark.parametrize("value", ["1", "0"])
def test_the_hint_holds_for_the_calls_of_the_loops_of_transformers_only(environment, value):
    """A logits processor that runs a model inside the loop gets all logits."""
    assert last_json(run(environment, "-c", HINTS, value, STATICLLM_HINTS=value)) == []


@pytest.mark.parametrize(
    ("version", "more", "is_wrapped"),
    [
        ("5.5.4", {}, True),
        ("5.6.0", {}, False),
        ("4.57.1", {}, False),
        ("", {}, False),
        ("6.0.0.dev0", {"STATICLLM_HINTS": "1"}, True),
        ("5.5.4", {"STATICLLM_HINTS": "0"}, False),
    ],
)
def test_only_tested_versions_of_transformers_are_changed_and_nothing_is_imported(
    environment, tmp_path, version, more, is_wrapped
):
    package = tmp_path / "transformers" / "generation"
    package.mkdir(parents=True)
    (tmp_path / "transformers" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    (package / "__init__.py").touch()
    (package / "utils.py").write_text("class GenerationMixin:\n    def _sample(self): pass\n")
    program = (
        "import sys, transformers.generation.utils as u; "
        f"assert hasattr(u.GenerationMixin._sample, '__wrapped__') is {is_wrapped};"
        "assert not any(name.startswith('openvino') or name == 'staticllm' for name in sys.modules); print('[]')"
    )
    path = os.pathsep.join((environment["PYTHONPATH"], str(tmp_path)))
    assert last_json(run(environment, "-c", program, PYTHONPATH=path, **more)) == []
