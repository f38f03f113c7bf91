"""From a Hugging Face model to a model directory, as a whole or not at all."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from staticllm.errors import ConfigError, ModelError, quoted
from staticllm.export.config_size import check_config_size
from staticllm.export.environment import OnStep, ask, ignore_step
from staticllm.export.weights import WeightFormat, WeightType, weights_for
from staticllm.model_paths import path_kinds as kinds
from staticllm.model_paths.hub_names import WEIGHTS
from staticllm.model_paths.path_kind import ModelPath, path_kind
from staticllm.system.files import read_regular, refusal_of
from staticllm.wire.held_files import patiently

DECODER = "text-generation-with-past"
TASKS = {
    "text-generation": DECODER,
    "feature-extraction": "feature-extraction",
    "text-classification": "text-classification",
}
"""What ``--task`` takes → optimum's name."""
LEAST_SECONDS, MOST_SECONDS = 3600.0, 24 * 3600.0
BYTES_PER_SECOND = 200_000
"""An export reads, traces, compresses and writes at least so fast, on the slowest machine that it is meant for."""
_SHARE = {"int4": 1.5, "int8": 1.7, "f16": 1.1, "f32": 2.2}
"""Bytes on the disk during an export, per byte of the original in 16 bits: compressed weights are written beside others."""
_UNFINISHED = ".unfinished-"
_OLD_SECONDS = 48 * 3600.0
_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True)
class ExportRequest:
    """What is exported, and how; what is None is chosen for the ``device`` and the model (``weights_for``)."""

    source: str
    """A folder, or a name on the hub (``owner/name``)."""
    target: Path
    device: str = "NPU"
    weights: WeightType | None = None
    group_size: int | None = None
    is_symmetric: bool | None = None
    task: str | None = None
    """One of ``TASKS``."""
    trusts_remote_code: bool = False


@dataclass(frozen=True)
class Exported:
    """A model directory that was written: its weights and its bytes."""

    directory: Path
    weights: WeightFormat
    is_decoder: bool
    num_bytes: int
    difference: str = ""
    """Which text its tokenizer reads in another way than the original, in a line; "" if none is known."""


def check_request(request: ExportRequest) -> None:
    """Check what can be checked without the environment for exports.

    Raises:
        ConfigError: impossible weights, or a target that cannot be written.
        ModelError: the source is no model that can be exported.
    """
    _check_target(request.target)
    found = path_kind(request.source)
    is_decoder = request.task in (None, "text-generation")
    if found.kind is not kinds.HUB_NAME:
        is_decoder = _task(request, found) == DECODER
    weights_for(request.device, is_decoder, request.weights, request.group_size, request.is_symmetric)


def export(request: ExportRequest, python: Path, on_step: OnStep = ignore_step) -> Exported:
    """Write the model directory of a request with an interpreter that ``check_python`` took.

    A folder is exported without any access to the network, unless the code of others is trusted, which may name other places.

    Raises:
        ConfigError, ModelError: see ``check_request``; or optimum cannot export the model, or there is no room.
    """
    check_request(request)
    found = path_kind(request.source)
    if found.kind is kinds.HUB_NAME:
        found = path_kind(_resolved(request.source, python, on_step))
    task = _task(request, found)
    is_decoder = task == DECODER
    weights = weights_for(request.device, is_decoder, request.weights, request.group_size, request.is_symmetric)
    num_bytes = sum(path.stat().st_size for path in found.directory.iterdir() if path.suffix in WEIGHTS)
    check_config_size(found.directory, num_bytes)
    seconds = min(LEAST_SECONDS + num_bytes / BYTES_PER_SECOND, MOST_SECONDS)
    with _scratch(request.target, num_bytes, weights) as scratch:
        values = {
            "do": "export", "folder": str(found.directory.absolute()), "target": str(scratch / "model"),
            "scratch": str(scratch / "plain"), "task": task, "trust_remote_code": request.trusts_remote_code,
            "dtype": weights.dtype, "compression": weights.compression,
        }  # fmt: skip
        environment = {name: str(scratch / "temporary") for name in ("TMPDIR", "TEMP", "TMP")}
        if not request.trusts_remote_code:
            environment["HF_HUB_OFFLINE"] = "1"
        try:
            done = ask(python, values, seconds, on_step, environment)
        except ModelError as error:
            raise ModelError(f"{quoted(request.source)} cannot be exported: {_with_remedy(str(error))}") from None
        written = path_kind(scratch / "model", needs_tokenizer=is_decoder)
        if not written.is_loadable:
            missing = written.found or "openvino_model.xml"
            raise ModelError(
                f"{quoted(request.source)} cannot be exported: optimum has not written {missing}; check that its "
                "tokenizer is complete"
            )
        num_written = sum(path.stat().st_size for path in (scratch / "model").rglob("*"))
        _move(scratch / "model", request.target)
    return Exported(request.target, weights, is_decoder, num_written, _line(done.get("tokenizer")))


def _line(value: object) -> str:
    """Return a text of the tool in a line; "" for none."""
    return "".join(each if each.isprintable() else "?" for each in value) if isinstance(value, str) else ""


def _with_remedy(reason: str) -> str:
    """Return the reason with what helps, if that is not in it."""
    if "trust_remote_code" in reason or "custom code" in reason:
        return "it brings code of its own (*.py): read it, and add --trust-remote-code if it may run"
    if "No space left" in reason:
        return f"{reason}: free space beside the target"
    if "Weights only load failed" in reason:
        return "its weights are a pickle with more than tensors, which could run code: give a folder with safetensors"
    if "SafetensorError" in reason:
        return f"its weights are damaged, {reason}: download them again"
    if "LocalEntryNotFoundError" in reason or any(words in reason for words in _OFFLINE):
        return "a file is missing that would be looked up on the hub (tokenizer or configuration): download the whole folder"
    return reason


_OFFLINE = ("couldn't connect to", "outgoing traffic has been disabled", "offline mode")
"""Parts of the sentences about files that are missing where the network must not be used, or cannot be."""


def _resolved(name: str, python: Path, on_step: OnStep) -> str:
    """Return the folder of a name on the hub."""
    try:
        return str(ask(python, {"do": "resolve", "name": name}, MOST_SECONDS, on_step)["folder"])
    except (ModelError, KeyError) as error:
        is_missing = "LocalEntryNotFoundError" in str(error) or any(words in str(error) for words in _OFFLINE)
        reason = "it is not in its cache, and the hub cannot be asked" if is_missing else str(error)
        raise ModelError(
            f"{name!r} is no folder, and cannot be had from Hugging Face ({reason}): check the name, the network, HF_HUB_OFFLINE "
            "and HF_TOKEN, or give a folder"
        ) from None


def _task(request: ExportRequest, found: ModelPath) -> str:
    """Return optimum's name of the task.

    Raises:
        ModelError: it is something else than a Hugging Face model for text.
    """
    if found.is_loadable:
        raise ModelError(f"{found.what}, which needs no export: use it as it is, staticllm run {found.directory}")
    if found.kind is kinds.ADAPTER:
        raise ModelError(
            f"{found.what}: export {_base(found.directory)}, and give the adapter with adapters= (docs/generation.md)"
        )
    if found.kind is kinds.HUGGING_FACE or (found.kind.name == "hugging face" and request.task is not None):
        return found.task if request.task is None else TASKS[request.task]
    raise ModelError(found.problem)


def _base(adapter: Path) -> str:
    """Return the name of the model that an adapter changes."""
    with suppress(OSError, ValueError, RecursionError):
        config = json.loads(read_regular(adapter / "adapter_config.json", _CONFIG_BYTES))
        name = config.get("base_model_name_or_path") if isinstance(config, dict) else None
        if isinstance(name, str) and name.isprintable() and 0 < len(name) <= 200:
            return f"the model that it was made for ({name})"
    return "the model that it was made for"


def _check_target(target: Path) -> None:
    """Raise ``ConfigError`` if no folder can be made there: it holds something, is in use, or cannot be written."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise ConfigError(f"{quoted(target)} exists and is no folder: choose another path")
    if target.is_dir():
        if any(target.iterdir()):
            raise ConfigError(f"{quoted(target)} is not empty: choose the path of a new folder")
        if target.resolve() == Path.cwd() or os.path.ismount(target):
            raise ConfigError(
                f"{quoted(target)} cannot be replaced, as it is in use: choose the path of a new folder in it"
            )
    parent = target.absolute().parent
    if not parent.is_dir():
        raise ConfigError(f"the folder {quoted(parent)} does not exist: make it first")
    if reason := refusal_of(parent):
        raise ConfigError(f"{quoted(target)} cannot be written, {quoted(parent)} {reason}: choose another path")


@contextmanager
def _scratch(target: Path, num_bytes: int, weights: WeightFormat) -> Iterator[Path]:
    """Make the folder beside the target in which the model is written, and remove it with what is left in it."""
    parent = target.absolute().parent
    _remove_unfinished(parent, target.name)
    needed = int(_SHARE[weights.kind] * num_bytes)
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise ConfigError(
            f"the export needs about {needed / 1e9:.1f} GB in {quoted(parent)}, which has {free / 1e9:.1f} GB free: free "
            "space, or choose a folder of a larger disk"
        )
    scratch = parent / f".{target.name}{_UNFINISHED}{os.getpid()}.{secrets.token_hex(4)}"
    try:
        for name in ("model", "plain", "temporary"):
            (scratch / name).mkdir(parents=True)
        yield scratch
    except OSError as error:
        raise ConfigError(
            f"{quoted(target)} cannot be written ({error.strerror or error}): choose another path"
        ) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _remove_unfinished(parent: Path, name: str) -> None:
    for path in parent.glob(f".{name}{_UNFINISHED}*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _OLD_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def _move(model: Path, target: Path) -> None:
    if target.is_dir():
        target.rmdir()  # raises if something was put there meanwhile
    patiently(partial(model.rename, target))
