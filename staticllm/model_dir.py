"""A model directory: is everything there, and is it whole? Asked before OpenVINO reads it, which may crash on a short file."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from staticllm.errors import ModelError

if TYPE_CHECKING:
    import openvino as ov

MODEL_XML = "openvino_model.xml"
TOKENIZER_XML = ("openvino_tokenizer.xml", "openvino_detokenizer.xml")
_CONST_DATA = re.compile(rb'\boffset="(\d+)"[^>]*?\bsize="(\d+)"|\bsize="(\d+)"[^>]*?\boffset="(\d+)"')


def demo_model_path() -> Path:
    """The embedded demo model."""
    return Path(__file__).parent / "demo_model"


def check_model_dir(
    path: str | bytes | os.PathLike[str], needs_tokenizer: bool = True, weights: str | None = None
) -> Path:
    """The directory if a whole IR lies in it, with its tokenizer if it is needed; ``weights`` may lie elsewhere.

    Raises:
        ModelError: something is missing or shorter than it must be; the message names the file.
    """
    try:
        directory = Path(os.fsdecode(path))
    except TypeError:
        raise ModelError(f"models_path is a {type(path).__name__}: must be the path of a model directory") from None
    if not directory.is_dir():
        raise ModelError(f"no model directory at {str(directory)!r}")
    for name in (MODEL_XML, *(TOKENIZER_XML if needs_tokenizer else ())):
        _check_ir(directory / name, Path(weights) if weights and name == MODEL_XML else None)
    return directory


def weights_of(directory: Path, weights: str | None = None) -> Path:
    """The file that holds the weights."""
    return Path(weights) if weights else (directory / MODEL_XML).with_suffix(".bin")


def _check_ir(xml: Path, weights: Path | None = None) -> None:
    if not xml.is_file():
        raise ModelError(
            f"{xml.name} is missing in {str(xml.parent)!r}: export the model with optimum-cli export openvino"
        )
    text = xml.read_bytes()
    if not text.rstrip().endswith(b"</net>"):
        raise ModelError(f"{str(xml)!r} is cut short ({len(text)} bytes): export or copy it again")
    weights = weights or xml.with_suffix(".bin")
    size = weights.stat().st_size if weights.is_file() else 0
    needed = max((int(a or d) + int(b or c) for a, b, c, d in _CONST_DATA.findall(text)), default=0)
    if size < needed:
        raise ModelError(f"{str(weights)!r} has {size} bytes, {xml.name} needs {needed}: export or copy it again")


def read_model(core: ov.Core, directory: Path, weights: str | None = None) -> ov.Model:
    """Read the IR of a checked directory; ``weights`` may lie elsewhere.

    Raises:
        ModelError: OpenVINO cannot read it, or it is not a language model.
    """
    try:
        model = core.read_model(directory / MODEL_XML, weights_of(directory, weights))
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ModelError(f"OpenVINO cannot read {str(directory / MODEL_XML)!r}: {lines[-1]}") from error
    names = {name for port in model.inputs for name in port.get_names()}
    outputs = {name for port in model.outputs for name in port.get_names()}
    if "input_ids" not in names or "logits" not in outputs:
        raise ModelError(
            f"{str(directory)!r} is not a causal language model: it needs an input 'input_ids' and an output 'logits', "
            f"it has {sorted(names)} and {sorted(outputs)}"
        )
    return model
