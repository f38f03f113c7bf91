"""Exports a Hugging Face model with optimum. This file runs in the environment for exports, which lacks staticllm: it imports
nothing of ours, and only what `packages.py` lists.

stdin has one request, a JSON object in a line; its end ends the process. stdout gets JSON objects, one a line: ``{"step": text}``
for what is done now, and at last ``{"done": values}`` or ``{"error": text}``. All that libraries print goes to stderr.
"""

# pyright: reportMissingImports=false
# Only the environment for exports has optimum.

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, TextIO

IGNORED = ("*.gguf", "*.h5", "*.msgpack", "*.onnx*", "*.ot", "*.tflite", "onnx/*", "openvino/*", "original/*", "*.pth")
"""Files of a model on the hub that are the same weights again."""
PICKLED = "*.bin"
TOKENIZER, ORIGINAL = "openvino_tokenizer.xml", "tokenizer.json"
_MAX_CHARS = 2000
_MAX_MODULES = 64

Values = dict[str, Any]


def main() -> None:
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        _stay_alone(answers)
        request = json.loads(sys.stdin.readline())
        threading.Thread(target=_end_with_parent, daemon=True).start()
        try:
            done = DO[request["do"]](request, answers)
        except MemoryError:
            _write(answers, {"error": "there is not enough memory: close other programs"})
        except Exception as error:
            logging.getLogger(__name__).exception("the request failed")
            _write(answers, {"error": _first_line(error)})
        else:
            _write(answers, {"done": done})
        os._exit(0)  # without the threads and the exit handlers of libraries


def _stay_alone(answers: TextIO) -> None:
    """Let no other process hold the pipes. OpenVINO's and NNCF's telemetry forks and reports; without its package they do not."""
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
    if hasattr(os, "register_at_fork"):
        for pipe in (answers.fileno(), 0):
            os.register_at_fork(after_in_child=partial(os.close, pipe))


def _end_with_parent() -> None:
    """End this process when its parent has ended, or does not need it any more."""
    sys.stdin.read()
    os._exit(1)


def _write(answers: TextIO, values: Values) -> None:
    answers.write(json.dumps(values) + "\n")
    answers.flush()


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{lines[0] if lines else ''} ({type(error).__name__})".strip()[:_MAX_CHARS]


def versions(request: Values, answers: TextIO) -> Values:
    """Return the version of Python, and those of the ``packages``; None for one that is missing."""
    found: Values = {}
    for name in request["packages"]:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return {"python": sys.version.split()[0], "packages": found}


def resolve(request: Values, answers: TextIO) -> Values:
    """Return the folder of a model of the hub, which is downloaded as far as the cache lacks it."""
    from huggingface_hub import snapshot_download

    _write(answers, {"step": "looking for the model on the hub"})
    name = request["name"]
    found = snapshot_download(name, ignore_patterns=[*IGNORED, PICKLED, "*.safetensors"])
    _write(answers, {"step": "downloading the model"})
    commit = Path(found).name  # what is listed may change meanwhile
    folder = Path(snapshot_download(name, revision=commit, ignore_patterns=[*IGNORED, PICKLED]))
    if not any(folder.glob("*.safetensors")):
        snapshot_download(name, revision=commit, ignore_patterns=list(IGNORED))
    return {"folder": str(folder)}


def export(request: Values, answers: TextIO) -> Values:
    """Write the model directory of a ``folder`` to ``target``, which exists and is empty, as ``scratch`` is.

    With ``compression``, the model is written to ``scratch`` first. If ``stateful`` is given and False, keys and values are
    inputs and outputs of a decoder.
    """
    folder = Path(request["folder"])
    target = Path(request["target"])
    compression = request["compression"]
    written = target if compression is None else Path(request["scratch"])
    _write(answers, {"step": "loading torch and optimum"})
    said = _keep_warnings()
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig, OVWeightQuantizationConfig

    config = OVConfig(
        dtype=request["dtype"],
        quantization_config=None if compression is None else OVWeightQuantizationConfig(**compression),
    )
    _write(answers, {"step": "reading the weights and tracing the model"})
    main_export(
        str(folder), written, task=request["task"], ov_config=config, convert_tokenizer=True, library_name="transformers",
        trust_remote_code=request["trust_remote_code"], local_files_only=not request["trust_remote_code"],
        stateful=request.get("stateful", True),
    )  # fmt: skip
    if not (written / TOKENIZER).is_file():
        reason = next((line for line in reversed(said) if "okenizer" in line), "the folder has none")
        raise ValueError(f"its tokenizer cannot be converted: {reason}")
    if compression is not None:
        _write(answers, {"step": f"compressing the weights to {compression['bits']} bits"})
        _compress(written, target, request["task"], config)
    _copy_modules(folder, target)
    _write(answers, {"step": "comparing the tokenizer with the original"})
    try:
        difference = _tokenizer_difference(target)
    except Exception as error:  # the model is written
        difference = f"they cannot be compared: {_first_line(error)}"
    return {"tokenizer": difference}


def _tokenizer_difference(target: Path) -> str | None:
    """Return in a line which text has other ids than in the original tokenizer; None if none has, or there is none."""
    if not (target / ORIGINAL).is_file():
        return None
    import openvino_tokenizers  # noqa: F401 - brings the operations of tokenizers
    from openvino import Core
    from tokenizers import Tokenizer

    own = Core().compile_model(str(target / TOKENIZER), "CPU")
    original = Tokenizer.from_file(str(target / ORIGINAL))
    original.no_padding()
    original.no_truncation()
    texts = _sibling("tokenizer_texts")

    def there(text: str) -> list[list[int]]:
        return [original.encode(text, add_special_tokens=adds).ids for adds in (True, False)]

    found: str | None = texts.first_difference(
        lambda text: own([text])["input_ids"][0].tolist(), there, texts.sample_texts(texts.added_tokens(original))
    )
    return found


def _sibling(name: str) -> Any:
    """Return a module beside this file, whose folder is not on the path of an isolated interpreter."""
    spec = spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compress(written: Path, target: Path, task: str, config: Any) -> None:
    """Write an exported model with compressed weights, and move its other files. The exported weights are read meanwhile."""
    from optimum import intel

    kind = getattr(intel, CLASSES[task])
    model = kind.from_pretrained(str(written), compile=False, use_cache=task.endswith("with-past"))
    intel.OVQuantizer(model).quantize(ov_config=config, save_directory=target)
    for path in written.iterdir():
        if not (target / path.name).exists():
            path.rename(target / path.name)


def _keep_warnings() -> list[str]:
    """Return the list that gets the warnings of libraries: optimum only logs that it cannot convert a tokenizer."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            with contextlib.suppress(Exception):
                lines.append(" ".join(record.getMessage().split())[:_MAX_CHARS])

    logging.getLogger().addHandler(Keep(logging.WARNING))
    return lines


def _copy_modules(folder: Path, target: Path) -> None:
    """Copy what sentence-transformers adds to an encoder: its order of modules, poolings, dense layers and prompts."""
    for path in sorted(folder.glob("*sentence*.json")):
        shutil.copyfile(path, target / path.name)
    modules = folder / "modules.json"
    if not modules.is_file():
        return
    shutil.copyfile(modules, target / modules.name)
    for name in _folders_of(json.loads(modules.read_text("utf-8"))):
        original = folder / name
        if original.resolve().is_relative_to(folder.resolve()) and original.is_dir() and not (target / name).exists():
            shutil.copytree(original, target / name)


def _folders_of(modules: Any) -> Iterator[str]:
    """Yield the folders that a list of modules names below that of the model; a name with a path is none of them."""
    for module in modules[:_MAX_MODULES] if isinstance(modules, list) else ():
        name = module.get("path") if isinstance(module, dict) else None
        if isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name:
            yield name


CLASSES = {
    "text-generation-with-past": "OVModelForCausalLM",
    "feature-extraction": "OVModelForFeatureExtraction",
    "text-classification": "OVModelForSequenceClassification",
}
"""Task of an export → optimum's class for it."""
DO = {"versions": versions, "resolve": resolve, "export": export}

if __name__ == "__main__":
    main()
