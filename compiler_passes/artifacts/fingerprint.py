"""The fingerprint of a blob set names everything that must be equal where the set is loaded, in terms that users know."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import openvino as ov

from staticllm import ports
from staticllm.errors import ModelError, quoted
from staticllm.model_dir import model_in_memory
from staticllm.model_paths.path_kind import MODEL_XML
from staticllm.system.threads import ThreadPool
from staticllm.version import __version__

from ..compiling import keep_small_constants

PIECE = 16 << 20
"""Bytes per piece. A file's digest is the digest of its pieces' digests, which are computed in parallel."""
_PASSES = Path(__file__).parents[1]
_NO_PASSES = ("artifacts", "compiling", "conversion", "npu_compiler")
"""The rooms beside the passes, whose code does not change what a program computes."""
_NO_DEFAULT = "-"


def _labelled(label: str, default: str | None = _NO_DEFAULT) -> Any:
    """Return a field with the ``label`` that manifests and messages show. ``default`` None: the field may be absent."""
    metadata = {"label": label}
    return field(metadata=metadata) if default == _NO_DEFAULT else field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class ModelFingerprint:
    """Digests of a graph and of its weights."""

    ir_digest: str = _labelled("IR digest")
    weights_digest: str = _labelled("weights digest")


@dataclass(frozen=True, kw_only=True)
class Fingerprint(ModelFingerprint):
    """Everything that must be equal where a set is loaded.

    ``platform``, ``driver`` and ``compiler`` are present if the device reports them. ``choices``: what the user chose, by the
    names that users know. Lengths and sizes are resolved, so a default equals the same value given by the user.
    """

    kind: str = _labelled("kind of model")
    openvino: str = _labelled("OpenVINO")
    plugin: str = _labelled("plugin")
    passes: str = _labelled("passes")
    device: str = _labelled("device")
    device_name: str = _labelled("device name")
    capabilities: str = _labelled("capabilities")
    platform: str | None = _labelled("NPU platform", default=None)
    driver: str | None = _labelled("driver", default=None)
    compiler: str | None = _labelled("compiler", default=None)
    choices: Mapping[str, str]

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is of a set that was compiled for a platform, without a device."""
        return self.platform is not None and not self.device_name

    def to_json(self) -> dict[str, str]:
        """Return label → value of every field that is present, and of every choice."""
        values = {label: getattr(self, name) for label, name in _LABELS.items()}
        return {**{label: value for label, value in values.items() if value is not None}, **self.choices}

    @classmethod
    def from_json(cls, content: Mapping[str, str]) -> Fingerprint:
        """Return the fingerprint that ``to_json`` made ``content`` of.

        Raises:
            ValueError: a field is missing.
        """
        needed = {label for label, name in _LABELS.items() if name not in ("platform", "driver", "compiler")}
        if missing := sorted(needed - set(content)):
            raise ValueError(f"the fingerprint has no {missing[0]!r}")
        own = {name: content[label] for label, name in _LABELS.items() if label in content}
        return cls(**own, choices={label: value for label, value in content.items() if label not in _LABELS})

    def difference(self, there: Fingerprint) -> str | None:
        """Describe the first difference from ``there``, the fingerprint of a set; None if there is no difference."""
        if self.kind != there.kind:
            return f"this model is {with_article(self.kind)}, the blob is of {with_article(there.kind)}"
        here = self.to_json()
        other = there.to_json()
        labels = [label for label, name in _LABELS.items() if not there.is_elsewhere or name not in _OF_DEVICES]
        for label in (*labels, *self.choices, *there.choices):
            mine = here.get(label) or "nothing"
            theirs = other.get(label) or "nothing"
            if mine == theirs:
                continue
            if label in _DIGESTS:
                return f"{label}: different {_DIGESTS[label]} ({mine[:12]} here, {theirs[:12]} in the blob)"
            if label in _LABELS:
                return f"{label} {mine}, blob {theirs}"
            return f"{label[:40]} {mine} asked, the blob has {theirs[:200]}"
        return None


_LABELS = {item.metadata["label"]: item.name for item in fields(Fingerprint) if "label" in item.metadata}
"""The name of each field by the label that manifests and messages show."""
_OF_DEVICES = frozenset({"openvino", "plugin", "device_name", "capabilities", "driver", "compiler"})
"""Fields about which a set that was compiled without a device says nothing, or what the device is asked for each blob."""
DENSE = "Dense modules"
_DIGESTS = {"IR digest": "graph", "weights digest": "weights", DENSE: "weights"}
"""The labels whose values are digests, and what they are digests of."""


def with_article(kind: str) -> str:
    """Return the name of a kind of model with its article."""
    return f"{'an' if kind[:1] in 'aeiou' else 'a'} {kind}"


def file_digest(path: Path) -> str:
    """Return the hex digest (BLAKE2b over pieces) of a file's bytes and its length.

    Raises:
        ModelError: the file cannot be read.
    """
    try:
        size = path.stat().st_size
        with ThreadPool(min(4, os.cpu_count() or 1), "staticllm-files") as pool:
            pieces = list(pool.map(lambda start: _digest_of_piece(path, start), range(0, max(size, 1), PIECE)))
    except OSError as error:
        raise ModelError(f"{quoted(path)} cannot be read: {error.strerror or error}") from None
    return bytes_digest(b"".join(pieces) + size.to_bytes(8, "little"))


def _digest_of_piece(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.blake2b(file.read(PIECE), digest_size=32).digest()


def bytes_digest(data: bytes | memoryview, key: bytes = b"") -> str:
    """Return the hex digest (BLAKE2b) of bytes, keyed with ``key`` if there is one."""
    return pieces_digest((data,), key)


def pieces_digest(pieces: Iterable[bytes | memoryview], key: bytes = b"") -> str:
    """Return the hex digest of bytes that come in pieces."""
    digest = hashlib.blake2b(digest_size=32, key=hashlib.sha256(key).digest() if key else b"")
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def fingerprint_model(
    directory: Path,
    weights: Path | None = None,
    model_file: str = MODEL_XML,
    digest_of: Callable[[Path], str] = file_digest,
) -> ModelFingerprint:
    """Return the digests of the graph and of its weights, which are beside the graph or at ``weights``.

    Args:
        digest_of: Returns what ``file_digest`` does.

    Raises:
        ModelError: a file cannot be read.
    """
    if (held := model_in_memory(directory)) is not None:
        return ModelFingerprint(
            ir_digest=bytes_digest(held.xml.encode()), weights_digest=bytes_digest(held.weights.data.tobytes())
        )
    xml = directory / model_file
    return ModelFingerprint(ir_digest=digest_of(xml), weights_digest=digest_of(weights or xml.with_suffix(".bin")))


_REPORTED = {"driver": "NPU_DRIVER_VERSION", "compiler": "NPU_COMPILER_VERSION"}


def machine_values(core: ov.Core, device: str) -> dict[str, str]:
    """Return what describes the machine and the compiler of ``device``: values of ``Fingerprint`` by field name."""
    supported = core.get_property(device, "SUPPORTED_PROPERTIES")
    found = {
        "openvino": ov.get_version(),
        "plugin": str(next(iter(core.get_versions(device).values())).build_number),
        "passes": passes_digest(),
        "device": device,
        "device_name": str(core.get_property(device, "FULL_DEVICE_NAME")).strip(),
        "capabilities": ", ".join(core.get_property(device, "OPTIMIZATION_CAPABILITIES")),
    }
    for name, key in _REPORTED.items():
        if key in supported:
            found[name] = str(core.get_property(device, key))
    if device.startswith("NPU") and "DEVICE_ARCHITECTURE" in supported:
        found["platform"] = str(core.get_property(device, "DEVICE_ARCHITECTURE")).upper().removeprefix("NPU")
    return found


@cache
def passes_digest() -> str:
    """Return a digest of the code that turns models into programs: sets made by different passes are different sets.

    A frozen application has no such files; the package version takes their place.
    """
    files = "".join(f"{name}{digest}" for name, digest in pass_digests().items())
    return bytes_digest(f"{__version__}{files}".encode())[:16]


@cache
def pass_digests() -> Mapping[str, str]:
    """Return file → digest of its source, for every module that decides what a program contains.

    Passes are named by their room and file (``states/lift_state``). Comments count too: parsing costs more than it saves.
    """
    files = {path.relative_to(_PASSES): path for path in sorted(_PASSES.rglob("*.py"))}
    passes = {
        place.with_suffix("").as_posix(): path for place, path in files.items() if place.parts[0] not in _NO_PASSES
    }
    others = {path.stem: path for path in (Path(str(module.__file__)) for module in (ports, keep_small_constants))}
    return {name: file_digest(path)[:8] for name, path in {**passes, **others}.items() if path.is_file()}
