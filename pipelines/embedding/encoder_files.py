"""Reads the embedding settings of a model directory: pooling, Dense modules, prompts and the maximum text length."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staticllm.adapters.safetensors_file import parse_safetensors
from staticllm.config import is_whole
from staticllm.core import Pooling
from staticllm.errors import ModelError, last_line, quoted
from staticllm.model_dir import max_positions
from staticllm.system.files import read_regular

from ...compiler_passes.shapes.add_pooling import ACTIVATIONS, Dense

MOST_CHARS = 1024
"""Of the path of a module in its model directory."""
MAX_JSON = 1 << 20
MAX_DENSE_BYTES = 1 << 30
POOLINGS: dict[str, Pooling] = {
    "cls": "first", "pooling_mode_cls_token": "first",
    "mean": "mean", "pooling_mode_mean_tokens": "mean",
    "lasttoken": "last", "pooling_mode_lasttoken": "last",
    "mean_sqrt_len_tokens": "mean_sqrt_len", "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean", "pooling_mode_weightedmean_tokens": "weighted_mean",
}  # fmt: skip
"""The modes of sentence-transformers that one matrix product computes."""

ORDER = ("Transformer", "Pooling", "Dense", "Normalize", "LogitScore")
"""The modules that programs compute, in their order. A ``Dropout`` may stand anywhere: it changes nothing."""
SENTENCE_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""The files with the longest text, newest first; sentence-transformers 6 has it in ``tokenizer_config.json``."""
NO_LIMIT = 10**9
"""Tokenizers without a limit have a larger ``model_max_length``."""
TRUSTED = "torch."
"""sentence-transformers uses its default in place of a function from elsewhere, and so do we."""
DOCUMENT_NAMES = ("document", "passage", "corpus")
"""The names of the prompt for documents, in the order of sentence-transformers."""


@dataclass(frozen=True)
class EncoderFiles:
    """The settings in the files of sentence-transformers; None or empty where the files have none."""

    pooling: Pooling | None = None
    dense: tuple[Dense, ...] = ()
    max_length: int | None = None
    """In tokens."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts to put before queries (``query``) and documents (the first of ``DOCUMENT_NAMES`` that is not empty)"""
    is_normalised: bool | None = None
    """Whether the model's modules end with a normalisation."""
    is_prompt_pooled: bool = True
    """Whether the tokens of a prompt count in the vector of its text."""
    default_prompt: str = ""
    """Goes before texts of which nothing is said."""
    is_lower_cased: bool = False
    """Whether texts are made lower case before the tokenizer gets them."""
    score_tokens: tuple[int, ...] = ()
    """The tokens for a bad and for a good text (``LogitScore``)."""

    @property
    def document_prompt(self) -> str:
        """The text to put before documents."""
        return next((text for name in DOCUMENT_NAMES if (text := self.prompts.get(name))), "")


def read_encoder_files(directory: Path) -> EncoderFiles:
    """Read ``modules.json`` and the folders that it names, the maximum text length, and the prompts.

    Raises:
        ModelError: a file is damaged, or a module computes something that encoder programs do not have.
    """
    modules = read_json(directory / "modules.json", list) or _default_modules(directory)
    pooling: Pooling | None = None
    dense: list[Dense] = []
    kinds: list[str] = []
    is_prompt_pooled = True
    score_tokens = tuple[int, ...]()
    for module in modules:
        kind = str(_field(module, "type")).rsplit(".", 1)[-1]
        path = str(module.get("path", ""))
        folder = _folder(directory, path)
        kinds.append(kind)
        if kind == "Pooling":
            pooling = _pooling(folder / "config.json")
            is_prompt_pooled = read_json(folder / "config.json", dict).get("include_prompt", True) is not False
        elif kind == "Dense":
            dense.append(_dense(folder))
        elif kind == "LogitScore":
            score_tokens = _score_tokens(folder / "config.json")
        elif kind not in (*ORDER, "Dropout"):
            raise ModelError(f"{directory / 'modules.json'}: a module {kind!r} is not supported")
    _check_order(directory, [kind for kind in kinds if kind != "Dropout"])
    length, is_lower_cased = _sentence_config(directory)
    if length is None and "Transformer" in kinds:
        length = _tokenizer_length(directory)
    prompts, default_prompt = _prompts(directory)
    return EncoderFiles(
        pooling=pooling,
        dense=tuple(dense),
        max_length=length,
        prompts=prompts,
        is_normalised="Normalize" in kinds if modules else None,
        is_prompt_pooled=is_prompt_pooled,
        default_prompt=default_prompt,
        is_lower_cased=is_lower_cased,
        score_tokens=score_tokens,
    )


def _check_order(directory: Path, kinds: list[str]) -> None:
    """Check that a transformer, a pooling, Dense modules and a normalisation come in this order, as programs compute them.

    Raises:
        ModelError: they do not.
    """
    if kinds != sorted(kinds, key=ORDER.index) or kinds.count("Pooling") > 1:
        raise ModelError(
            f"{directory / 'modules.json'}: the modules {', '.join(kinds)}: only this order is supported: {', '.join(ORDER)}"
        )


def _sentence_config(directory: Path) -> tuple[int | None, bool]:
    """Return the longest text in tokens, None if it is not given, and whether texts are made lower case.

    Raises:
        ModelError: a value is impossible.
    """
    name = next((name for name in SENTENCE_CONFIGS if os.path.lexists(directory / name)), SENTENCE_CONFIGS[0])
    found = read_json(directory / name, dict)
    length = found.get("max_seq_length")
    is_lower_cased = found.get("do_lower_case", False)
    if length is not None and not is_whole(length, 1):
        raise ModelError(f"{name}: max_seq_length is {length!r}: must be a whole number from 1")
    if not isinstance(is_lower_cased, bool):
        raise ModelError(f"{name}: do_lower_case is {is_lower_cased!r}: must be true or false")
    return length, is_lower_cased


def _tokenizer_length(directory: Path) -> int | None:
    """Return the longest text in tokens as sentence-transformers takes it from the tokenizer; None if it has no limit."""
    length = read_json(directory / "tokenizer_config.json", dict).get("model_max_length")
    if not is_whole(length, 1, NO_LIMIT - 1):
        return None
    return min(length, max_positions(directory) or length)


def _score_tokens(path: Path) -> tuple[int, int]:
    """Return the tokens for a bad and for a good text.

    Raises:
        ModelError: one is missing, or there are other scores.
    """
    found = read_json(path, dict)
    tokens = found.get("false_token_id"), found.get("true_token_id")
    if not all(is_whole(token, 0) for token in tokens):
        raise ModelError(
            f"{path}: false_token_id and true_token_id are {tokens[0]!r} and {tokens[1]!r}: only scores of two tokens are "
            "supported"
        )
    if found.get("module_input_name", "causal_logits") != "causal_logits":
        raise ModelError(f"{path}: module_input_name is {found['module_input_name']!r}: must be 'causal_logits'")
    return tokens


def _folder(directory: Path, path: str) -> Path:
    """Return the folder of a module.

    Raises:
        ModelError: it is outside the model directory, or no folder can have this path.
    """
    try:
        path.encode()  # Windows takes a surrogate in a name, and other systems do not
        if len(path) > MOST_CHARS:
            raise OSError("it is too long")
        found = (directory / path).resolve()
        home = directory.resolve()
        with suppress(FileNotFoundError, NotADirectoryError):
            os.stat(found)  # noqa: PTH116 - where ``is_dir`` may only say no
    except (OSError, ValueError, RuntimeError) as error:  # a NUL, a surrogate, a loop of links
        raise ModelError(
            f"{directory / 'modules.json'}: the path {quoted(path[:80])} cannot be a folder: {last_line(error)}"
        ) from None
    if found != home and home not in found.parents:
        raise ModelError(f"{directory / 'modules.json'}: the path {quoted(path)} leaves the model directory")
    return directory / path


def _default_modules(directory: Path) -> list[dict[str, str]]:
    """Return the pooling folder if there is one; some exports have it without ``modules.json``."""
    has_pooling = os.path.lexists(directory / "1_Pooling" / "config.json")
    return [{"type": "Pooling", "path": "1_Pooling"}] if has_pooling else []


def _pooling(path: Path) -> Pooling:
    """Return the pooling of a file as sentence-transformers reads it: ``pooling_mode``, else the older flags."""
    found = read_json(path, dict)
    named = found.get("pooling_mode")
    flags = {name: value for name, value in found.items() if name.startswith("pooling_mode_")}
    modes = [name for name, value in flags.items() if value is True] or ["pooling_mode_mean_tokens"] * bool(flags)
    if named is not None:
        modes = named if isinstance(named, list) else [named]
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in POOLINGS:
        several = "several poolings at once are not supported, " if len(modes) > 1 else ""
        raise ModelError(
            f"{path}: pooling {', '.join(map(str, modes)) or 'not given'}: {several}must be one of cls, mean, lasttoken, "
            "mean_sqrt_len_tokens, weightedmean"
        )
    return POOLINGS[modes[0]]


def _prompts(directory: Path) -> tuple[dict[str, str], str]:
    """Return the prompts by name, and the one that goes before texts of which nothing is said.

    Raises:
        ModelError: they are no texts, or the default is not among them.
    """
    found = read_json(directory / "config_sentence_transformers.json", dict)
    prompts = found.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError("config_sentence_transformers.json: prompts must map names to texts")
    name = found.get("default_prompt_name")
    if name is None or name in ("query", "document"):
        return prompts, prompts.get(name, "")
    if not isinstance(name, str) or name not in prompts:
        names = ", ".join(prompts) or "none"
        raise ModelError(
            f"config_sentence_transformers.json: default_prompt_name {name!r} is none of the prompts ({names})"
        )
    return prompts, prompts[name]


def _dense(folder: Path) -> Dense:
    """Read a Dense module as sentence-transformers does, which uses Tanh unless a function of PyTorch is named.

    Raises:
        ModelError: a file is damaged, or the module computes something else.
    """
    config = read_json(folder / "config.json", dict)
    named = str(config.get("activation_function", ""))
    name = named.rsplit(".", 1)[-1].lower() if named.startswith(TRUSTED) else "tanh"
    if name not in ACTIVATIONS:
        raise ModelError(f"{folder / 'config.json'}: the activation {name!r} is not one of {', '.join(ACTIVATIONS)}")
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, "sentence_embedding"):
            raise ModelError(
                f"{folder / 'config.json'}: {key} is {config[key]!r}: only a Dense of the embedding is supported"
            )
    path = folder / "model.safetensors"
    if not path.is_file():
        raise ModelError(f"{folder}: has no model.safetensors; a pickled pytorch_model.bin is not read: save it again")
    tensors = _read_safetensors(path)
    weight = tensors.get("linear.weight")
    if weight is None:
        raise ModelError(f"{path}: has no tensor linear.weight")
    has_residual = bool(config.get("use_residual", False))
    residual = tensors.get("residual.weight") if has_residual else None
    if has_residual and residual is None and len(set(weight.shape)) > 1:
        raise ModelError(f"{path}: has no tensor residual.weight, which use_residual needs between two widths")
    return Dense(weight, tensors.get("linear.bias"), name, has_residual, residual)


def _read_safetensors(path: Path) -> dict[str, NDArray[np.float32]]:
    """Return the tensors of a file in the format of safetensors, as f32."""
    try:
        data = read_regular(path, MAX_DENSE_BYTES)
    except (OSError, MemoryError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {last_line(error)}") from None
    try:
        tensors = parse_safetensors(data)
    except ValueError as error:
        raise ModelError(f"{path}: is not a file of safetensors ({error})") from None
    found = {}
    for name, tensor in tensors.items():
        try:
            found[name] = tensor.to_f32()
        except ValueError:
            raise ModelError(f"{path}: {name} has the type {tensor.dtype}, only F32, F16 and BF16 are read") from None
    return found


def _field(module: Any, name: str) -> Any:
    if not isinstance(module, dict) or name not in module:
        raise ModelError(f"modules.json: the module {module!r} has no {name!r}")
    return module[name]


def read_json(path: Path, kind: type, most_bytes: int = MAX_JSON) -> Any:
    """Return the content of a file, or an empty ``kind`` if there is none.

    Raises:
        ModelError: it cannot be read, is not JSON, or of another kind.
    """
    if not os.path.lexists(path):
        return kind()
    try:
        found = json.loads(read_regular(path, most_bytes))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {last_line(error)}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is not JSON ({error})") from None
    if not isinstance(found, kind):
        raise ModelError(f"{path}: must hold a JSON {'object' if kind is dict else 'list'}")
    return found
