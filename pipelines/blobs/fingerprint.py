"""What a set of blobs is for: everything that must be equal where it is loaded, each thing under a name that a user knows."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import openvino as ov

from staticllm.config import StaticLLMConfig
from staticllm.core import KVType, Phase, ProgramMode
from staticllm.errors import ModelError
from staticllm.model_dir import MODEL_XML, model_in_memory

Identity = dict[str, str]
PIECE = 16 << 20
"""Bytes that are digested at once. The digest of a file is that of its pieces' digests, so that two cores share a large one."""
_DRIVER_PROPERTIES = {"driver": "NPU_DRIVER_VERSION", "compiler": "NPU_COMPILER_VERSION"}
_PASSES = Path(__file__).resolve().parent.parent / "compiler_passes"


def file_digest(path: Path) -> str:
    """Hex digest (BLAKE2b over pieces) of a file's bytes and its length.

    Raises:
        ModelError: the file cannot be read.
    """
    try:
        size = path.stat().st_size
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            pieces = list(pool.map(lambda start: _piece(path, start), range(0, max(size, 1), PIECE)))
    except OSError as error:
        raise ModelError(f"{str(path)!r} cannot be read: {error.strerror or error}") from None
    return bytes_digest(b"".join(pieces) + size.to_bytes(8, "little"))


def _piece(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.blake2b(file.read(PIECE), digest_size=32).digest()


def bytes_digest(data: bytes | memoryview, key: bytes = b"") -> str:
    """Hex digest (BLAKE2b) of bytes; with a key only its owner can compute it."""
    return hashlib.blake2b(data, digest_size=32, key=hashlib.sha256(key).digest() if key else b"").hexdigest()


def model_identity(directory: Path, weights: Path | None = None) -> Identity:
    """Digests of the graph and of its weights."""
    if (held := model_in_memory(directory)) is not None:
        return {
            "IR digest": bytes_digest(held.xml.encode()),
            "weights digest": bytes_digest(held.weights.data.tobytes()),
        }
    xml = directory / MODEL_XML
    return {"IR digest": file_digest(xml), "weights digest": file_digest(weights or xml.with_suffix(".bin"))}


def machine_identity(core: ov.Core, device: str) -> Identity:
    """What the programs were compiled by and for. Driver and compiler where the device tells."""
    supported = core.get_property(device, "SUPPORTED_PROPERTIES")
    found = {
        "OpenVINO": ov.get_version(),
        "plugin": str(next(iter(core.get_versions(device).values())).build_number),
        "passes": passes_digest(),
        "device": device,
        "device name": str(core.get_property(device, "FULL_DEVICE_NAME")).strip(),
        "capabilities": ", ".join(core.get_property(device, "OPTIMIZATION_CAPABILITIES")),
    }
    for name, key in _DRIVER_PROPERTIES.items():
        if key in supported:
            found[name] = str(core.get_property(device, key))
    return found


@cache
def passes_digest() -> str:
    """A digest of what turns models into programs: a set made by other passes is another set."""
    return bytes_digest("".join(f"{name}{digest}" for name, digest in pass_digests().items()).encode())[:16]


@cache
def pass_digests() -> Mapping[str, str]:
    """File → digest of its source, of every module in ``compiler_passes``."""
    return {path.stem: file_digest(path)[:8] for path in sorted(_PASSES.glob("*.py"))}


def layout_identity(
    config: StaticLLMConfig, programs: str, kv_type: KVType, properties: Mapping[Phase, Mapping[str, Any]]
) -> Identity:
    """What was asked for: lengths, sizes and properties, resolved, so that a default equals the same value given."""
    mode: ProgramMode = "separate" if programs == "separate" else "shared"
    sizes = {
        "MAX_PROMPT_LEN": config.max_prompt_len,
        "MIN_RESPONSE_LEN": config.min_response_len,
        "PROGRAMS": programs,
        "KV_CACHE_PRECISION": kv_type,
        "MAX_NUM_SEQS": config.num_seqs(mode),
        "KV_SLOTS": config.num_kv_slots(mode),
        "PREFILL_ROWS": config.prefill_rows,
        "PREFILL_KV_LENS": config.prefill_kv_lens,
        "GENERATE_KV_LENS": config.generate_kv_lens,
    }
    found = {name: "default" if value is None else str(value) for name, value in sizes.items()}
    for phase, values in properties.items():
        found[f"{phase} properties"] = ", ".join(f"{key}={value}" for key, value in sorted(values.items()))
    return found


REQUIRED = ("IR digest", "weights digest", "OpenVINO", "device")
"""Names that every identity has."""
ASKED = ("MAX_PROMPT_LEN", "MIN_RESPONSE_LEN", "PROGRAMS", "KV_CACHE_PRECISION", "MAX_NUM_SEQS", "KV_SLOTS")
"""Said by a user, unlike the rest, which is so."""


def difference(here: Identity, there: Identity) -> str | None:
    """The first thing that differs, in a few words; None if nothing does."""
    for name in (*here, *there):
        mine, theirs = here.get(name, "nothing"), there.get(name, "nothing")
        if mine == theirs:
            continue
        if name.endswith("digest"):
            return f"{name}: other {'weights' if 'weights' in name else 'graph'} ({mine[:12]} here, {theirs[:12]} in the blob)"
        is_asked = name in ASKED or name.startswith(("PREFILL", "GENERATE")) or name.endswith("properties")
        return f"{name} {mine} asked, the blob has {theirs}" if is_asked else f"{name} {mine}, blob {theirs}"
    return None
