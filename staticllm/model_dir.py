"""Checks that a model directory is complete, before OpenVINO reads it, which may crash on a truncated file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from staticllm.errors import ModelError, enough_memory, last_line, quoted
from staticllm.model_paths.path_kind import MODEL_XML, TOKENIZER_XML
from staticllm.system.files import open_regular, read_regular
from staticllm.system.ir_file import MAX_XML, Constant, IrError, IrFile, packed_texts, read_ir
from staticllm.wire.file_stamp import Stamp, stamp_of

if TYPE_CHECKING:
    import openvino as ov

MAX_CONFIG = 16 << 20
MAX_NUMBER = 1 << 40
_JOINING = frozenset(
    ("Parameter", "Convert", "Const", "VocabDecoder", "FuzeRagged", "UTF8Validate", "StringTensorPack", "Result")
)
"""Operations of a detokenizer that joins the bytes of tokens."""


def demo_model_path() -> Path:
    """Return the directory of the embedded demo model."""
    return Path(__file__).parent / "demo_model"


def check_model_files(
    directory: Path,
    needs_tokenizer: bool = True,
    weights: str | None = None,
    is_encrypted: bool = False,
    model_file: str = MODEL_XML,
) -> Path:
    """Check that a directory has a complete IR, and a tokenizer if that is needed, and return it.

    Args:
        weights: The weights file, if it is not beside the IR. The size of an encrypted weights file is not known in
            advance, so it only has to exist.
        model_file: Another IR in a directory that its pipeline has checked.

    Raises:
        ModelError: a file is missing, truncated or damaged; the message names it.
    """
    if is_in_memory(directory):
        return directory
    if model_file != MODEL_XML:
        check_ir(directory / model_file, Path(weights) if weights else None, is_encrypted)
        return directory
    for name in (MODEL_XML, *(TOKENIZER_XML if needs_tokenizer else ())):
        is_model = name == MODEL_XML
        ir = check_ir(directory / name, Path(weights) if weights and is_model else None, is_encrypted and is_model)
        if not is_model:
            _check_texts(directory / name, ir)
    return directory


def note_given(directory: Path, path: Path) -> None:
    """Note what a user gave for a model directory that was made of it, for messages."""
    _GIVEN[directory] = path


def given_as(directory: Path) -> str:
    """Return what a user calls a model directory: the file that it was made of in this process, or itself."""
    return str(_GIVEN.get(directory, directory))


def is_in_memory(directory: object) -> bool:
    """Return whether this is the name of a model that is not on disk."""
    return isinstance(directory, Path) and directory in _IN_MEMORY


def path_of(path: object) -> Path:
    """Return the path that a user gave.

    Raises:
        ModelError: it is none.
    """
    try:
        return Path(os.fsdecode(path))  # type: ignore[arg-type]
    except Exception:  # it is of another type, or of a caller's class
        raise ModelError(f"models_path is a {type(path).__name__}: must be the path of a model directory") from None


def joins_tokens(directory: Path) -> bool:
    """Return whether the detokenizer of a model directory joins the bytes of tokens, and does nothing else to the text.

    Others put spaces between tokens, or correct the text, so that the text of a token depends on its neighbours.

    Raises:
        ModelError: the detokenizer is missing or damaged.
    """
    return check_ir(directory / TOKENIZER_XML[1]).operations <= _JOINING


def weights_of(directory: Path, weights: str | None = None, model_file: str = MODEL_XML) -> Path:
    return Path(weights) if weights else (directory / model_file).with_suffix(".bin")


def has_files(directory: Path) -> bool:
    """Return whether the graph and the weights of a model are there."""
    return (directory / MODEL_XML).is_file() and weights_of(directory).is_file()


def weights_size(directory: Path, weights: str | None = None, model_file: str = MODEL_XML) -> int:
    """Return the number of bytes of the weights."""
    if directory in _IN_MEMORY:
        return int(_IN_MEMORY[directory].weights.byte_size)
    return weights_of(directory, weights, model_file).stat().st_size


@dataclass(frozen=True)
class ModelInMemory:
    """An IR that is not on disk: the text of its XML, and the bytes of its weights file."""

    xml: str
    weights: ov.Tensor


def keep_in_memory(xml: object, weights: ov.Tensor) -> Path:
    """Return a name that stands for a model directory until ``forget_in_memory``; nothing is written to disk.

    Raises:
        ModelError: the text is not an IR, or has fewer bytes of weights than the IR needs.
    """
    if not isinstance(xml, str) or not xml.rstrip().endswith("</net>"):
        raise ModelError(f"the model is a {type(xml).__name__}: with weights it must be the complete XML of an IR")
    needed = _needed(xml.encode())
    if weights.byte_size < needed:
        raise ModelError(f"the weights have {weights.byte_size} bytes, the model needs {needed}: pass all of them")
    name = Path(f"<model in memory {next(_numbers)}>")
    _IN_MEMORY[name] = ModelInMemory(xml, weights)
    return name


def forget_in_memory(name: Path) -> None:
    """Release a model in memory; a path has no effect."""
    _IN_MEMORY.pop(name, None)


def model_in_memory(name: Path) -> ModelInMemory | None:
    """Return the model that a name stands for; None for the path of a directory."""
    return _IN_MEMORY.get(name)


_GIVEN: dict[Path, Path] = {}
_IN_MEMORY: dict[object, ModelInMemory] = {}
DECODER_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx")
"""What decoders call the number of positions. Encoders with relative ones have ``n_positions`` without a limit."""
_numbers = count(1)


def max_positions(directory: Path, names: Sequence[str] = ("max_position_embeddings",)) -> int | None:
    """Return the longest sequence that a model was made for, in tokens, from its ``config.json``; None if that has none.

    The first of ``names`` that the configuration has counts.
    """
    found = (_from_config(directory, name) for name in names)
    return next((values[0] for values in found if values is not None), None)


def model_widths(directory: Path) -> tuple[int, int] | None:
    """Return a model's hidden size and the inner size of its feed-forward layers, from ``config.json``; None without both."""
    found = _from_config(directory, "hidden_size", "intermediate_size")
    return None if found is None else (found[0], found[1])


def _from_config(directory: Path, *names: str) -> list[int] | None:
    """Return positive whole numbers from ``config.json``; None if one is missing or is something else."""
    try:
        config = json.loads(read_regular(directory / "config.json", MAX_CONFIG))
        config = config.get("text_config", config)
        found = [config.get(name) for name in names]
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return found if all(type(value) is int and 0 < value <= MAX_NUMBER for value in found) else None


def kv_shapes(directory: Path, model_file: str = MODEL_XML) -> list[tuple[int, int]]:
    """Return heads and head size of each state of keys or values; empty if the IR does not have them.

    Raises:
        ModelError: the directory is missing or damaged.
    """
    held = model_in_memory(directory)
    if held is not None:
        return _read_ir(held.xml.encode(), MODEL_XML).kv_shapes
    xml = directory / model_file
    return _parsed(xml, stamp_of(xml)).kv_shapes


def _needed(xml: bytes, name: str = MODEL_XML) -> int:
    """Return the number of bytes of weights that an IR refers to.

    Raises:
        ModelError: the IR is damaged.
    """
    return _read_ir(xml, name).num_weight_bytes


def _read_ir(xml: bytes, name: str) -> IrFile:
    try:
        return read_ir(xml)
    except IrError as error:
        raise ModelError(f"{name} {error}: export or copy it again") from None


def check_ir(xml: Path, weights: Path | None = None, is_encrypted: bool = False) -> IrFile:
    """Return the structure of an IR file whose weights file is complete; ``weights`` defaults to the ``.bin`` beside it.

    Raises:
        ModelError: a file is missing, damaged or too short.
    """
    if not xml.is_file():
        raise ModelError(f"{xml.name} is missing in {quoted(xml.parent)}: export the model with `staticllm export`")
    ir = _parsed(xml, stamp_of(xml))
    weights = weights or xml.with_suffix(".bin")
    needed = 1 if is_encrypted else ir.num_weight_bytes
    is_there = weights.is_file()
    if needed and not is_there:
        what = "is no file" if weights.exists() else "is missing"
        raise ModelError(
            f"{quoted(weights)} {what}, {xml.name} needs {needed} bytes of weights: export or copy it again"
        )
    size = weights.stat().st_size if is_there else 0
    if size < needed:
        raise ModelError(f"{quoted(weights)} has {size} bytes, {xml.name} needs {needed}: export or copy it again")
    return ir


@lru_cache(8)  # loading reads it several times, and a large XML takes 0.1 s
def _parsed(xml: Path, stamp: Stamp) -> IrFile:
    try:
        text = read_regular(xml, MAX_XML)
    except OSError as error:
        raise ModelError(f"{quoted(xml)} cannot be read: {error.strerror or error}") from None
    with enough_memory(ModelError, f"the graph in {quoted(xml)}"):
        return _read_ir(text, repr(str(xml)))


def _check_texts(xml: Path, ir: IrFile) -> None:
    """Check the vocabulary offsets in the weights file of a tokenizer, because a wrong one kills the process."""
    import numpy as np

    weights = xml.with_suffix(".bin")
    with open_regular(weights) as file:
        for begins, ends, text in packed_texts(ir):
            first, last = (np.frombuffer(_at(file, constant), "<i4") for constant in (begins, ends))
            if (first < 0).any() or (last < first).any() or (last > text.size).any():
                raise ModelError(
                    f"{quoted(weights)} is damaged: its vocabulary offsets point outside the file; export or copy it again"
                )


def _at(file: BinaryIO, constant: Constant) -> bytes:
    file.seek(constant.offset)
    return file.read(constant.size)


def read_model(
    core: ov.Core,
    directory: Path,
    weights: str | None = None,
    decrypt: Callable[[bytes], bytes] | None = None,
    model_file: str = MODEL_XML,
) -> ov.Model:
    """Read the IR of a checked directory.

    Args:
        weights: The weights file, if it is not beside the IR.
        decrypt: Decrypts the weights; None if they are not encrypted.

    Raises:
        ModelError: OpenVINO cannot read the IR, or it cannot be decrypted.
    """
    xml = directory / model_file
    try:
        if (held := model_in_memory(directory)) is not None:
            model = core.read_model(held.xml, held.weights)
        elif decrypt is None:
            model = core.read_model(xml, weights_of(directory, weights, model_file))
        else:
            model = _decrypted(core, xml, weights_of(directory, weights, model_file), decrypt)
    except RuntimeError as error:
        raise ModelError(f"OpenVINO cannot read {quoted(xml)}: {last_line(error)}") from error
    return model


def _decrypted(core: ov.Core, path: Path, weights: Path, decrypt: Callable[[bytes], bytes]) -> ov.Model:
    """Read a model whose weights are encrypted on disk and decrypted only in memory.

    Raises:
        ModelError: the callback failed, or returned too few bytes.
    """
    import numpy as np
    import openvino as ov

    xml = path.read_text(encoding="utf-8")
    try:
        plain = bytes(decrypt(weights.read_bytes()))
    except Exception as error:  # the user's function may raise anything
        raise ModelError(f"{quoted(weights)} cannot be decrypted: {type(error).__name__}: {error}") from error
    needed = _needed(xml.encode())
    if len(plain) < needed:
        raise ModelError(
            f"{quoted(weights)} has {len(plain)} bytes decrypted, {path.name} needs {needed}: check the key"
        )
    return core.read_model(xml, ov.Tensor(np.frombuffer(plain, np.uint8).copy()))
