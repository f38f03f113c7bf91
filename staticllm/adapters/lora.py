"""Reads a LoRA adapter: for each layer that it changes, two low-rank matrices (LoRA, arXiv 2106.09685, section 4.1).

A *file* is what GenAI takes: the matrices alone. A *directory* is what PEFT writes: the file and ``adapter_config.json``, whose
``lora_alpha`` and ``r`` scale the matrices. With a file, the alpha of a request is the whole factor, as in GenAI.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from staticllm.adapters.safetensors_file import SafetensorsFile, parse_adapter, read_safetensors
from staticllm.errors import AdapterError, enough_memory, quoted
from staticllm.model_paths.path_kind import ModelPath, path_kind
from staticllm.model_paths.path_kinds import ADAPTER
from staticllm.model_paths.path_kinds import FILE as FILE_KIND
from staticllm.system.files import read_regular

FILE = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
MAX_CONFIG = 1 << 20
MAX_RANK = 1024
"""The largest rank of one layer, over all adapters of a pipeline."""
MAX_VALUE = 1e4
"""The largest number in an adapter. Every row of a shared call is multiplied by every adapter, and then by 0 where it has another
one; larger numbers could overflow before that, and make the answers of other requests NaN."""
PREFIX = "base_model.model."
_PART = re.compile(r"(?P<path>.+?)[._]lora[._](?P<part>A|B|down|up)(?:\.[\w-]+)?\.weight")
_IGNORED = re.compile(r".+\.(alpha|base_layer\.weight)")
"""Tensors that are left out, as in GenAI: an alpha, because that of the request counts, and the model's own weights, which PEFT
saves beside an adapter of the head."""
_SIDES = {"A": "a", "down": "a", "B": "b", "up": "b"}
_TRAINED_OTHERWISE = (
    "use_dora", "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config",
    "layer_replication", "target_parameters", "trainable_token_indices", "modules_to_save", "lora_bias",
)  # fmt: skip
"""Fields of ``adapter_config.json`` for methods that compute something else, or that train more than matrices."""
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npz")
_SAVE_AGAIN = "save it as safetensors (PEFT's model.save_pretrained(folder) does), or give a safetensors file"
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the model's own weights as they are."""
MAX_PATTERN = 512
_REPEATS = re.compile(r"\\.|\)[*+?{]|[*+{]")
MAX_REPEATS = 4
"""Repetitions in a pattern of a path. More of them, or repeated groups, could take forever to match."""


@dataclass(frozen=True)
class LoraLayer:
    """The change of one layer: ``y += alpha * scale * (x @ a.T) @ b.T``, with ``a [rank, in]`` and ``b [out, rank]`` f32."""

    a: NDArray[np.float32]
    b: NDArray[np.float32]
    scale: float = 1.0

    @property
    def rank(self) -> int:
        """The number of rows of ``a``."""
        return int(self.a.shape[0])

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of values that the layer takes and returns."""
        return int(self.a.shape[1]), int(self.b.shape[0])


@dataclass(frozen=True, eq=False)
class LoraAdapter:
    """An adapter in memory."""

    name: str
    """A digest of the numbers: two adapters of the same name are the same."""
    layers: Mapping[str, LoraLayer]
    """Path of the module in the original model → its change."""
    file: str
    """Names the file in errors."""
    path: Path | None = None
    """The file or directory that was given, absolute; None for bytes."""

    @property
    def num_bytes(self) -> int:
        """The bytes of all matrices in f32."""
        return sum(layer.a.nbytes + layer.b.nbytes for layer in self.layers.values())


@dataclass(frozen=True)
class PeftConfig:
    """What ``adapter_config.json`` says about the scale of the matrices."""

    alpha: float
    is_rank_stabilized: bool = False
    alphas: Mapping[re.Pattern[str], float] = field(default_factory=dict)  # alpha_pattern: path → its own alpha

    def scale(self, path: str, rank: int) -> float:
        """Return the factor of one layer's matrices: alpha / rank, or alpha / sqrt(rank) (arXiv 2312.03732)."""
        own = (value for pattern, value in self.alphas.items() if pattern.match(path))
        return next(own, self.alpha) / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def read_adapter(path: str | os.PathLike[str]) -> LoraAdapter:
    """Read a file, or a directory of PEFT.

    Raises:
        AdapterError: something is missing, damaged or impossible, or is no LoRA adapter.
    """
    try:
        found = Path(os.fsdecode(path))
        is_directory = found.is_dir()
        if is_directory or not found.is_file():
            _check_kind(path_kind(found))
        weights = _weights_in(found) if is_directory else found
    except (TypeError, ValueError, OSError) as error:
        raise AdapterError(f"the adapter {quoted(str(path)[:200])} cannot be read: {error}") from None
    config = _read_config(found / CONFIG) if is_directory else None
    try:
        with enough_memory(AdapterError, f"the adapter {quoted(str(path)[:200])}"):
            return replace(_adapter(read_safetensors(weights), config), path=found.absolute())
    except OSError as error:
        raise AdapterError(f"the adapter {quoted(str(path)[:200])} cannot be read: {error.strerror or error}") from None
    except AdapterError:
        if weights.suffix in _OTHER_FORMATS and weights.is_file():
            raise AdapterError(f"the adapter {quoted(weights)} is no safetensors file: {_SAVE_AGAIN}") from None
        raise


def _weights_in(folder: Path) -> Path:
    """Return the path of the matrices in a directory of PEFT.

    Raises:
        AdapterError: they are there in another format.
    """
    others = [] if (folder / FILE).exists() else sorted(each for each in folder.iterdir() if _is_weights(each))
    if others:
        raise AdapterError(f"the adapter {quoted(folder)} has {others[0].name}, not {FILE}: {_SAVE_AGAIN}")
    return folder / FILE


def _is_weights(path: Path) -> bool:
    return path.suffix in (*_OTHER_FORMATS, ".safetensors") and path.is_file()


def _check_kind(held: ModelPath) -> None:
    """Check that a path may hold an adapter, by the names of its files; what is in them is checked later.

    Raises:
        AdapterError: it holds something else, or an adapter in a form that is not read; the message says what helps.
    """
    is_file = held.path.is_file() and held.kind in (FILE_KIND, ADAPTER)
    if is_file or held.kind is ADAPTER or held.kind.name == "missing":
        return
    if held.kind.name in ("adapter as pickle", "git-lfs", "archive", "subfolder"):
        raise AdapterError(f"the adapter {held.problem}")
    raise AdapterError(f"the adapter {held.what}: give a folder with {CONFIG} and {FILE}, or that file")


def adapter_in_memory(data: bytes) -> LoraAdapter:
    """Return the adapter in the bytes of a safetensors file.

    Raises:
        AdapterError: they are damaged or impossible, or those of no LoRA adapter.
    """
    with enough_memory(AdapterError, "an adapter in memory"):
        return _adapter(parse_adapter(data), None)


def _adapter(file: SafetensorsFile, config: PeftConfig | None) -> LoraAdapter:
    digest = hashlib.blake2b(digest_size=16)
    layers = dict[str, LoraLayer]()
    for path, names in sorted(_pairs(file).items()):
        a = _matrix(file, names["a"])
        b = _matrix(file, names["b"])
        if a.shape[0] != b.shape[1] or not a.size or not b.size:
            raise AdapterError(
                f"the adapter {quoted(file.name)}: {quoted(path)} has matrices of the shapes {list(a.shape)} and "
                f"{list(b.shape)}, must be [rank, in] and [out, rank]"
            )
        scale = 1.0 if config is None else config.scale(path, a.shape[0])
        layers[path] = LoraLayer(a, b, scale)
        digest.update(f"{path} {a.shape} {b.shape} {scale}".encode())
        digest.update(a.tobytes() + b.tobytes())
    return LoraAdapter(digest.hexdigest(), layers, file.name)


def _pairs(file: SafetensorsFile) -> dict[str, dict[str, str]]:
    """Return path → ``a`` and ``b`` → name of the tensor.

    Raises:
        AdapterError: there is a tensor of another kind, or a matrix without the other one.
    """
    found: dict[str, dict[str, str]] = {}
    for name in file.tensors:
        part = _PART.fullmatch(name)
        if part is None:
            if _IGNORED.fullmatch(name) is None:
                raise AdapterError(
                    f"the adapter {quoted(file.name)} has the tensor {name[:120]!r}, which is no low-rank matrix (whole weights, "
                    "biases, embeddings or DoRA): merge such an adapter into the model"
                )
            continue
        path = part["path"].removeprefix(PREFIX)
        if found.setdefault(path, {}).setdefault(_SIDES[part["part"]], name) != name:
            raise AdapterError(
                f"the adapter {quoted(file.name)} has two tensors for {quoted(path)}: {name!r} is the second"
            )
    for path, names in found.items():
        if len(names) != 2:
            raise AdapterError(
                f"the adapter {quoted(file.name)} has one of two matrices for {quoted(path)}: {next(iter(names.values()))!r}"
            )
    if not found:
        raise AdapterError(
            f"the adapter {quoted(file.name)} has no low-rank matrices (names that end in lora_A.weight)"
        )
    return found


def _matrix(file: SafetensorsFile, name: str) -> NDArray[np.float32]:
    """Return a tensor of two axes; further axes of size 1, as of a convolution, are dropped."""
    tensor = file.take(name)
    shape = tensor.shape
    if len(shape) < 2 or any(size != 1 for size in shape[2:]) or min(shape[:2]) > MAX_RANK:
        raise AdapterError(
            f"the adapter {quoted(file.name)}: {name!r} has the shape {list(shape)}, must be a matrix of rank {MAX_RANK} or less"
        )
    try:
        values = tensor.to_f32().reshape(shape[:2])
    except ValueError as error:
        raise AdapterError(f"the adapter {quoted(file.name)}: {name!r} has {error}") from None
    if values.size and not float(np.abs(values).max()) <= MAX_VALUE:  # also if it is NaN
        raise AdapterError(
            f"the adapter {quoted(file.name)}: {name!r} has numbers that are not finite, or larger than {MAX_VALUE:g}"
        )
    return values


def _read_config(path: Path) -> PeftConfig:
    try:
        content = json.loads(read_regular(path, MAX_CONFIG))
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{quoted(path)} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(content, dict):
        raise AdapterError(f"{quoted(path)} is no JSON object")
    for name in _TRAINED_OTHERWISE:
        if content.get(name):
            raise AdapterError(f"{quoted(path)}: {name} is not supported: merge such an adapter into the model")
    if str(content.get("peft_type", "LORA")).upper() != "LORA" or content.get("bias", "none") != "none":
        kind = f"peft_type={content.get('peft_type')!r}, bias={content.get('bias')!r}"
        raise AdapterError(f"{quoted(path)}: {kind[:120]}: only LoRA without biases can be run beside the model")
    start = content.get("init_lora_weights")
    if not any(start is each or (isinstance(start, str) and start == each) for each in _PLAIN_STARTS):
        raise AdapterError(
            f"{quoted(path)}: init_lora_weights={str(start)[:40]!r} has changed the model's own weights: save the adapter with "
            "path_initial_model_for_weight_conversion, or merge it into the model"
        )
    patterns = content.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise AdapterError(f"{quoted(path)}: alpha_pattern must be an object")
    alphas = {_path_pattern(path, pattern): _number(path, value) for pattern, value in patterns.items()}
    return PeftConfig(_number(path, content.get("lora_alpha", 8)), bool(content.get("use_rslora")), alphas)


def _path_pattern(path: Path, pattern: str) -> re.Pattern[str]:
    """Return what matches the paths that PEFT (``get_pattern_key``) finds with a pattern: a regular expression for their end."""
    repeats = [part for part in _REPEATS.findall(pattern) if not part.startswith("\\")]
    if len(pattern) > MAX_PATTERN or len(repeats) > MAX_REPEATS or any(part.startswith(")") for part in repeats):
        raise AdapterError(
            f"{quoted(path)}: the alpha_pattern {pattern[:80]!r} may take too long to match: at most {MAX_REPEATS} "
            f"repetitions, none of them of a group, and {MAX_PATTERN} characters are possible"
        )
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, RecursionError, OverflowError) as error:
        raise AdapterError(
            f"{quoted(path)}: the alpha_pattern {pattern[:80]!r} is no regular expression: {error}"
        ) from None


def _number(path: Path, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= MAX_VALUE:
        raise AdapterError(f"{quoted(path)}: lora_alpha={str(value)[:40]!r} must be a number up to {MAX_VALUE:g}")
    return float(value)


def shapes_of(adapter: LoraAdapter) -> Iterator[tuple[str, int, int, int]]:
    """Yield path, rank, in and out size of each layer, sorted by path."""
    for path, layer in sorted(adapter.layers.items()):
        yield path, layer.rank, *layer.sizes
