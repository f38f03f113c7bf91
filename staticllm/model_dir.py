"""A model directory: is everything there, and is it whole? Asked before OpenVINO reads it, which may crash on a short file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
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
    path: str | bytes | os.PathLike[str],
    needs_tokenizer: bool = True,
    weights: str | None = None,
    is_encrypted: bool = False,
) -> Path:
    """The directory if a whole IR lies in it, with its tokenizer if it is needed; ``weights`` may lie elsewhere.

    How large an encrypted weights file must be nobody knows: it need only be there.

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
        is_model = name == MODEL_XML
        _check_ir(directory / name, Path(weights) if weights and is_model else None, is_encrypted and is_model)
    return directory


def weights_of(directory: Path, weights: str | None = None) -> Path:
    """The file that holds the weights."""
    return Path(weights) if weights else (directory / MODEL_XML).with_suffix(".bin")


def _check_ir(xml: Path, weights: Path | None = None, is_encrypted: bool = False) -> None:
    if not xml.is_file():
        raise ModelError(
            f"{xml.name} is missing in {str(xml.parent)!r}: export the model with optimum-cli export openvino"
        )
    text = xml.read_bytes()
    if not text.rstrip().endswith(b"</net>"):
        raise ModelError(f"{str(xml)!r} is cut short ({len(text)} bytes): export or copy it again")
    weights = weights or xml.with_suffix(".bin")
    size = weights.stat().st_size if weights.is_file() else 0
    sizes = (int(a or d) + int(b or c) for a, b, c, d in _CONST_DATA.findall(text))
    needed = 1 if is_encrypted else max(sizes, default=0)
    if size < needed:
        raise ModelError(f"{str(weights)!r} has {size} bytes, {xml.name} needs {needed}: export or copy it again")


def read_model(
    core: ov.Core, directory: Path, weights: str | None = None, decrypt: Callable[[bytes], bytes] | None = None
) -> ov.Model:
    """Read the IR of a checked directory; ``weights`` may lie elsewhere, and be encrypted.

    Raises:
        ModelError: OpenVINO cannot read it, or it is not a language model.
    """
    try:
        if decrypt is None:
            model = core.read_model(directory / MODEL_XML, weights_of(directory, weights))
        else:
            model = _decrypted(core, directory, weights_of(directory, weights), decrypt)
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


def _decrypted(core: ov.Core, directory: Path, weights: Path, decrypt: Callable[[bytes], bytes]) -> ov.Model:
    """A model whose weights lie encrypted on disk, and plain in memory only.

    Raises:
        ModelError: the callback failed, or what it returned is too short.
    """
    import numpy as np
    import openvino as ov

    xml = (directory / MODEL_XML).read_text(encoding="utf-8")
    try:
        plain = bytes(decrypt(weights.read_bytes()))
    except Exception as error:  # of the user's own
        raise ModelError(f"{str(weights)!r} cannot be decrypted: {type(error).__name__}: {error}") from error
    needed = max((int(a or d) + int(b or c) for a, b, c, d in _CONST_DATA.findall(xml.encode())), default=0)
    if len(plain) < needed:
        raise ModelError(
            f"{str(weights)!r} has {len(plain)} bytes decrypted, {MODEL_XML} needs {needed}: is the key right?"
        )
    return core.read_model(xml, ov.Tensor(np.frombuffer(plain, np.uint8).copy()))
