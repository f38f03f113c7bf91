"""Replaces GenAI's class and the tests' models; scripts/genai_suite.py loads this into pytest and into samples.

The tests compare with a model from a hub, run by transformers. Here both the model and the reference are local: a model
directory, and openvino_genai's own stateful pipeline on it. Packages that serve only that comparison are replaced by
stand-ins if they are not installed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import runpy
import shutil
import sys
import tempfile
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import genai_suite_encoders
import genai_suite_speech
import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest

OWN = genai.LLMPipeline
MODEL = Path(os.environ.get("GENAI_SUITE_MODEL", "."))
LOG = os.environ.get("GENAI_SUITE_LOG")
SECONDS = int(os.environ.get("GENAI_SUITE_SECONDS", "60"))
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
STAND_INS = (
    "torch", "transformers", "optimum", "huggingface_hub", "requests", "datasets", "PIL", "langchain_core", "langchain_community",
)  # fmt: skip


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for every module of a package that is not installed."""

    def __init__(self, packages: list[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".", maxsplit=1)[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        special = {
            "tensor": Ids.of,
            "is_transformers_version": is_transformers_version,
            "AutoTokenizer": LocalTokenizer,
        }
        special |= {"TemporaryDirectory": tempfile.TemporaryDirectory, "snapshot_download": local_snapshot}
        module.__dict__.update(special)


class LocalTokenizer:
    """Stands for the class that reads the tokenizer of any model: there is only the local one."""

    @staticmethod
    def from_pretrained(*arguments: Any, **named: Any) -> Tokenizer:
        return Tokenizer()


def local_snapshot(*arguments: Any, **named: Any) -> str:
    return str(MODEL)


def copy_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the local model's tokenizer into ``folder``, in place of converting one."""
    for path in MODEL.glob("openvino_*tokenizer.*"):
        shutil.copy(path, folder)


class StandIn(types.ModuleType):
    """A module in which every name is an empty class, or an exception if the name ends like one."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (Exception,) if name.endswith(("Error", "Exception")) else (), {})
        setattr(self, name, made)
        return made


def is_transformers_version(operator: str, version: str) -> bool:
    """Compare with transformers 5.0, the version that the tests are written for."""
    there, asked = (5, 0), tuple(int(part) for part in version.split(".")[:2])
    return {"<": there < asked, "<=": there <= asked, ">": there > asked, ">=": there >= asked, "==": there == asked}[
        operator
    ]


class Ids(np.ndarray):
    """Token ids with the few methods of tensors that the tests use."""

    @classmethod
    def of(cls, values: Any) -> Ids:
        return np.asarray(values, np.int64).view(cls)

    def numel(self) -> int:
        return int(self.size)

    def numpy(self) -> Any:
        return np.asarray(self)


class Tokenizer:
    """The local model's tokenizer with the calls of transformers' tokenizers."""

    def __init__(self) -> None:
        self._own = genai.Tokenizer(MODEL)
        self.chat_template = self._own.chat_template

    def __call__(self, text: str, add_special_tokens: bool = True, **rest: Any) -> dict[str, Ids]:
        encoded = self._own.encode(text, add_special_tokens=add_special_tokens)
        parts = {"input_ids": encoded.input_ids, "attention_mask": encoded.attention_mask}
        return {name: Ids.of(np.array(tensor.data)) for name, tensor in parts.items()}

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool = False, **rest: Any) -> str:
        return str(self._own.apply_chat_template(messages, add_generation_prompt))

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return str(self._own.decode([int(token) for token in ids], skip_special_tokens))


class Reference:
    """GenAI's own stateful pipeline with the calls of transformers' models."""

    generation_config = None

    def __init__(self) -> None:
        self.pipe = OWN(MODEL, "CPU", ATTENTION_BACKEND="SDPA", **EXACT)

    def generate(self, input_ids: Any = None, inputs: Any = None, generation_config: Any = None, **rest: Any) -> Any:
        ids = np.atleast_2d(np.asarray(inputs if input_ids is None else input_ids))
        answer = self.pipe.generate(ov.Tensor(np.ascontiguousarray(ids)), generation_config)
        return types.SimpleNamespace(sequences=[Ids.of([*ids[0], *tokens]) for tokens in answer.tokens])


@dataclass(frozen=True)
class Converted:
    """The object that the tests call a converted model."""

    model_id: str
    opt_model: Reference
    hf_tokenizer: Tokenizer
    models_path: Path


def reference_results(model: Reference, tokenizer: Tokenizer, prompts: list[str], configs: Any) -> list[Any]:
    results = []
    for index, prompt in enumerate(prompts):
        config = configs[index] if isinstance(configs, list) else configs
        answer, result = model.pipe.generate([prompt], config), genai.GenerationResult()
        result.m_generation_ids, result.m_scores = answer.texts, answer.scores
        results.append(result)
    return results


def no_download(*arguments: Any, **named: Any) -> Any:
    pytest.skip("this test downloads a model of its own kind")


def local_models() -> types.ModuleType:
    """Return a replacement for the tests' ``utils.hugging_face``."""
    made: list[tuple[Reference, Tokenizer]] = []

    def converted(model_id: str, **rest: Any) -> Converted:
        if not made:
            made.append((Reference(), Tokenizer()))
        return Converted(model_id, *made[0], MODEL)

    module = StandIn("utils.hugging_face")
    module.__dict__.update(
        OVConvertedModelSchema=Converted,
        download_and_convert_model=converted,
        run_hugging_face=reference_results,
        convert_and_save_tokenizer=copy_tokenizer,
        generation_config_to_hf=lambda default, config: config,
        download_gguf_model=no_download,
        download_and_convert_model_class=no_download,
    )
    return module


def our_class() -> type:
    from staticllm import StaticLLMPipeline

    class LLMPipeline(StaticLLMPipeline):
        """Our class, on the CPU if the tests ask for an NPU."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            placed = tuple("CPU" if isinstance(item, str) and item == "NPU" else item for item in arguments)
            if named.get("device") == "NPU":
                named["device"] = "CPU"
            super().__init__(*placed, **named)

    return LLMPipeline


def in_f32(pipeline: type, draft_model: Any) -> tuple[type, Any]:
    """Return a class of pipelines that compute in f32, and the function for their draft models."""

    class LLMPipeline(pipeline):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **{**EXACT, **named})

    return LLMPipeline, lambda path, device="", **named: draft_model(path, device, **{**EXACT, **named})


def our_draft_model(models_path: Any, device: str = "", **properties: Any) -> Any:
    """Return our draft model, on the CPU if the tests ask for an NPU."""
    import staticllm

    return staticllm.draft_model(models_path, "CPU" if device == "NPU" else device, **properties)


def note(**entry: str) -> None:
    if LOG:
        with Path(LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Continue after a test that killed the process."""
    text = Path(LOG).read_text(encoding="utf-8") if LOG and Path(LOG).is_file() else ""
    seen = {json.loads(line)["test"] for line in text.splitlines()}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in seen])
    items[:] = [item for item in items if item.nodeid not in seen]
    for module in {
        item.module for item in items if isinstance(item, pytest.Function) and item.path.name == "test_rag.py"
    }:
        genai_suite_encoders.replace_references(module)
    genai_suite_speech.replace_references()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """End the process if a test hangs; the next process continues after that test."""
    import faulthandler

    note(test=item.nodeid, outcome="died")
    genai_suite_speech.begin(item)
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        lines = [line for line in str(report.longrepr or "").splitlines() if line.startswith("E  ")]
        is_expected = hasattr(report, "wasxfail")
        outcome = f"x{report.outcome}" if is_expected else report.outcome
        note(test=report.nodeid, outcome=outcome, reason=lines[0][1:].strip() if lines else "")


def install() -> None:
    missing = [name for name in STAND_INS if importlib.util.find_spec(name) is None]
    sys.meta_path.append(Finder(missing))
    if os.environ.get("GENAI_SUITE_CLASS") == "ours":
        genai.LLMPipeline = our_class()
        genai.draft_model = our_draft_model
        genai_suite_encoders.put_our_classes()
        genai_suite_speech.put_our_class()
    else:
        genai_suite_speech.put_own_class()
    if os.environ.get("GENAI_SUITE_EXACT"):
        genai.LLMPipeline, genai.draft_model = in_f32(genai.LLMPipeline, genai.draft_model)


if __name__ == "__main__":
    install()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
elif LOG:
    install()
    sys.modules["utils.hugging_face"] = local_models()
