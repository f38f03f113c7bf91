"""The manifest of a blob set records the variants of its blobs, their fingerprint, and the digests of their bytes.

A manifest may come from an untrusted source, so every field is checked before it is used: names are plain file names, sizes are
bounded, and ``decode`` refuses fields that are unknown, missing or of another type.
"""

from __future__ import annotations

import hmac
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from staticllm.core import KVType, Name, ProgramLayout, ProgramVariant
from staticllm.errors import ConfigError
from staticllm.kinds import KINDS
from staticllm.system.typed import typed

from ..compiling.compile import V
from .fingerprint import Fingerprint, bytes_digest

SCHEMA = 10
MAX_MANIFEST = 16 << 20
MAX_ENTRIES = 1 << 14
MAX_BLOB_BYTES = 1 << 40
MAX_SECONDS = 1 << 24
"""Upper bound on the cost of a call, in seconds."""
_BLOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.blob")
_DIGEST = re.compile(r"[0-9a-f]{64}")
T = TypeVar("T")


class ManifestError(Exception):
    """Describes in a few words what is wrong with a manifest."""


@dataclass(frozen=True)
class VariantFile:
    """A variant and the file that holds its program. Variants that share a program name the same file."""

    variant: ProgramVariant
    file: str


@dataclass(frozen=True)
class StoredBlob:
    """The expected contents of a blob's file: the BLAKE2b digest of its bytes, and their number."""

    digest: str
    num_bytes: int


@dataclass(frozen=True)
class Manifest:
    """The contents of a set.

    ``config`` and ``shape`` have the fields of the model's kind. ``kv_type`` is empty without KV slots. ``blobs``: file →
    its expected contents. ``properties``: OpenVINO's properties of each part that has its own, also those that a probe chose.
    ``few_rows``: the most rows of a call of the part of that name. ``costs``: measured seconds per call of a variant.
    ``verification``: the result of ``compile --verify``.
    """

    fingerprint: Fingerprint
    config: Mapping[str, Any]
    programs: str
    kv_type: str
    shape: Mapping[str, Any]
    properties: Mapping[str, Mapping[str, Any]]
    variants: tuple[VariantFile, ...]
    blobs: Mapping[str, StoredBlob]
    is_weightless: bool
    is_encrypted: bool
    costs: Mapping[Any, float] = field(default_factory=dict)
    few_rows: int = 1
    passes: Mapping[str, str] | None = None
    created: str = ""
    verification: Mapping[str, Any] | None = None

    @property
    def kind(self) -> str:
        """The name of the kind of model: ``decoder``, ``encoder`` …"""
        return self.fingerprint.kind

    def files_of(self, kind: type[V]) -> dict[V, str]:
        """Return variant → name of its blob, of the variants of one kind."""
        return {entry.variant: entry.file for entry in self.variants if isinstance(entry.variant, kind)}

    def costs_of(self, kind: type[V]) -> dict[V, float]:
        """Return variant → measured seconds per call, of the variants of one kind."""
        return {variant: seconds for variant, seconds in self.costs.items() if isinstance(variant, kind)}

    @property
    def num_bytes(self) -> int:
        return sum(blob.num_bytes for blob in self.blobs.values())

    @property
    def has_failed_verification(self) -> bool:
        """Whether the set differs too much from the reference. Such a set is quarantined and never loaded."""
        return self.verification is not None and not self.verification.get("is_ok")


def encode(manifest: Manifest, key: bytes = b"") -> bytes:
    """Return the bytes of a manifest, signed if there is a key."""
    content = json.loads(_canonical({"schema": SCHEMA, **manifest_to_json(manifest)}))
    return _framed(content, bytes_digest(_canonical(content), key), bool(key))


def decode(data: bytes, key: bytes = b"") -> Manifest:
    """Read a manifest and check every field.

    Raises:
        ManifestError: damaged, other schema or key, or an impossible value.
    """
    try:
        frame = json.loads(data)
        digest = frame["digest"]
        content = frame["content"]
        is_signed = frame["is_signed"]
        is_whole = data == _framed(content, digest, is_signed)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ManifestError("is damaged: its contents do not match its digest") from None
    if not is_whole or not isinstance(digest, str) or not _DIGEST.fullmatch(digest) or not isinstance(content, dict):
        raise ManifestError("is damaged: its contents do not match its digest")
    if content.get("schema") != SCHEMA:
        raise ManifestError(f"has schema {str(content.get('schema'))[:20]}, this version reads {SCHEMA}")
    if is_signed and not key:
        raise ManifestError("is signed: give its INTEGRITY_KEY (staticllm cache --key-file)")
    if key and not is_signed:
        raise ManifestError("is not signed, and INTEGRITY_KEY was given")
    if not hmac.compare_digest(digest.encode(), bytes_digest(_canonical(content), key).encode()):
        raise ManifestError(
            "is damaged, or signed with another INTEGRITY_KEY"
            if key
            else "is damaged: its contents do not match its digest"
        )
    try:
        return _checked({name: value for name, value in content.items() if name != "schema"})
    except (ConfigError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        detail = str(error).splitlines()[0][:200] if str(error) else ""
        raise ManifestError(f"has an impossible value ({type(error).__name__}: {detail})") from None


def manifest_to_json(manifest: Manifest) -> dict[str, Any]:
    """Return a manifest in the form that JSON holds, without the schema number."""
    plain = {item.name: getattr(manifest, item.name) for item in fields(manifest)}
    return {
        **plain,
        "fingerprint": manifest.fingerprint.to_json(),
        "variants": [{**msgspec.to_builtins(entry.variant), "file": entry.file} for entry in manifest.variants],
        "blobs": {name: {"digest": blob.digest, "bytes": blob.num_bytes} for name, blob in manifest.blobs.items()},
        "costs": [cost_to_json(variant, seconds) for variant, seconds in manifest.costs.items()],
    }


def cost_to_json(variant: ProgramVariant, seconds: float) -> dict[str, int | float]:
    """Return the cost of a variant, in seconds per call, in the form that JSON holds."""
    return {**msgspec.to_builtins(variant), "seconds": seconds}


def is_manifest(data: bytes) -> bool:
    """Return whether these bytes look like one of our manifests, of any version, damaged or not."""
    words = (b'"digest"', b'"content"', b'"schema"')
    has_fingerprint = b'"fingerprint"' in data or b'"identity"' in data  # as schema 4 called it
    return data.startswith(b"{") and has_fingerprint and all(word in data for word in words)


def is_blob_name(name: object) -> bool:
    """Return whether this is a plain file name of a blob, without a folder and not hidden."""
    return isinstance(name, str) and _BLOB_NAME.fullmatch(name) is not None and ".." not in name


# -- what JSON holds; a ValueError, TypeError or KeyError names the field that is wrong


_Line = Annotated[str, Meta(max_length=64)]
_Entries = Annotated[list[dict[str, Any]], Meta(max_length=MAX_ENTRIES)]


def stored(kind: type[T], content: object) -> T:
    """Return the value of a dataclass, or of another annotated type, that JSON holds.

    Raises:
        ValueError: a field is unknown, missing, of another type, or out of its bounds; the text says where.
    """
    names = [item.name for item in fields(kind)] if is_dataclass(kind) else []
    if names and isinstance(content, dict) and (different := sorted({*names} ^ {*content})):
        raise ValueError(f"the field {different[0][:80]!r} is unknown or missing")
    value = typed(content, kind)
    try:
        is_whole = msgspec.json.encode(value, order="sorted") == msgspec.json.encode(content, order="sorted")
    except (msgspec.MsgspecError, RecursionError, OverflowError) as error:
        raise ValueError(str(error) or "it is nested too deeply") from None
    if not is_whole:
        raise ValueError("a field within another is unknown or missing")
    return value


@dataclass(frozen=True)
class _StoredBlob:
    digest: Annotated[str, Meta(pattern=f"^{_DIGEST.pattern}$")]
    bytes: Annotated[int, Meta(ge=0, le=MAX_BLOB_BYTES)]


@dataclass(frozen=True)
class _Content:
    """A manifest as JSON holds it. The kind of model says what ``config``, ``shape``, variants and costs hold."""

    fingerprint: dict[str, Annotated[str, Meta(max_length=1 << 16)]]
    config: dict[str, Any]
    programs: ProgramLayout
    kv_type: KVType | Literal[""]
    shape: dict[str, Any]
    properties: dict[Name, dict[str, bool | int | float | str]]
    variants: _Entries
    blobs: dict[str, _StoredBlob]
    is_weightless: bool
    is_encrypted: bool
    costs: _Entries
    few_rows: Annotated[int, Meta(ge=1, le=MAX_ENTRIES)]
    passes: dict[str, _Line] | None
    created: _Line
    verification: dict[str, Any] | None


@dataclass(frozen=True)
class _Verdict:
    """The fields of a verification whose types matter."""

    is_ok: bool
    agreement: float = 0.0
    distance: float = 0.0
    reason: Annotated[str, Meta(max_length=4096)] = ""


def _checked(content: Mapping[str, Any]) -> Manifest:
    found = stored(_Content, content)
    name = found.fingerprint.get("kind of model", "")
    if name not in KINDS or KINDS[name].program is None:
        raise ValueError(f"the kind of model is {name[:40]!r}")
    kind = KINDS[name].program_class
    kind.check_stored(stored(kind.shape, found.shape), content)
    if found.verification is not None:
        verdict = typed(found.verification, _Verdict)
        if not (math.isfinite(verdict.agreement) and math.isfinite(verdict.distance)):
            raise ValueError("the verification has a number that is not finite")
    parsed = {
        "fingerprint": Fingerprint.from_json(found.fingerprint),
        "blobs": {name: StoredBlob(blob.digest, blob.bytes) for name, blob in found.blobs.items()},
        "variants": _variants(found, kind.variant),
        "costs": dict(cost_from_json(cost, kind.variant) for cost in found.costs),
    }
    return Manifest(**{**content, **parsed})


def _variants(content: _Content, kind: type[V]) -> tuple[VariantFile, ...]:
    for name in content.blobs:
        if not is_blob_name(name):
            raise ValueError(f"{name[:80]!r} is not a plain file name")
    found = []
    for entry in content.variants:
        sizes = {name: value for name, value in entry.items() if name != "file"}
        if entry.get("file") not in content.blobs:
            raise ValueError("a variant has no blob")
        found.append(VariantFile(stored(kind, sizes), entry["file"]))
    if not found and (content.verification is None or content.verification.get("is_ok")):
        raise ValueError("it has no variants")
    return tuple(found)


def cost_from_json(cost: object, kind: type[V]) -> tuple[V, float]:
    """Return the variant, of this type, and the seconds per call that ``cost_to_json`` made ``cost`` of.

    Raises:
        ValueError: it has another form, or an impossible value.
    """
    values = dict(stored(dict[str, int | float], cost))
    seconds = values.pop("seconds", -1.0)
    if not 0 <= seconds < MAX_SECONDS:
        raise ValueError("a cost is not in seconds")
    return stored(kind, values), float(seconds)


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _framed(content: Any, digest: str, is_signed: bool) -> bytes:
    """Return the only byte form of a manifest, so that a flipped bit is detected anywhere, even in white space."""
    frame = {"digest": digest, "is_signed": is_signed, "content": content}
    return json.dumps(frame, indent=1, sort_keys=True).encode() + b"\n"
