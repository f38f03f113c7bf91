"""The manifest of a blob set records the variants of its blobs, their fingerprint, and the digests of their bytes.

A manifest may come from an untrusted source, so every field is checked before it is used: names are plain file names, sizes are
bounded, and ``decode`` refuses fields that are unknown, missing or of another type.
"""

from __future__ import annotations

import hmac
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, get_args

from staticllm.config import StaticLLMConfig
from staticllm.core import (
    EncoderVariant,
    KVType,
    Phase,
    ProgramLayout,
    ProgramVariant,
    Variant,
)
from staticllm.errors import ConfigError
from staticllm.pipelines.blobs.encoder_fields import (
    check_encoder_choices,
    check_encoder_shape,
)
from staticllm.pipelines.blobs.fingerprint import EncoderFingerprint, Fingerprint, StepFingerprint, bytes_digest
from staticllm.pipelines.blobs.json_values import (
    MAX_SIZE,
    check_flag,
    check_one_of,
    list_of,
    object_of,
    text_of,
    whole_of,
)
from staticllm.pipelines.blobs.shape_fields import check_shape
from staticllm.pipelines.programs.lowered import V

SCHEMA = 9
MAX_MANIFEST = 16 << 20
MAX_ENTRIES = 1 << 14
MAX_BLOB_BYTES = 1 << 40
LAYOUT_FIELDS = (
    "max_prompt_len", "min_response_len", "programs", "prefill_rows", "prefill_kv_lens", "generate_kv_lens",
    "kv_cache_precision", "max_num_seqs", "kv_slots", "device_properties", "prefill_config", "generate_config",
)  # fmt: skip
"""Fields of the config that a blob set decides if the user does not give them."""
_BLOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.blob")
_DIGEST = re.compile(r"[0-9a-f]{64}")


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
        """The number of bytes of all blobs."""
        return sum(blob.num_bytes for blob in self.blobs.values())

    @property
    def has_failed_verification(self) -> bool:
        """Whether the set differs too much from the reference. Such a set is quarantined and never loaded."""
        return self.verification is not None and not self.verification.get("is_ok")


def encode(manifest: Manifest, key: bytes = b"") -> bytes:
    """Return the bytes of a manifest, signed if there is a key."""
    content = json.loads(_canonical({"schema": SCHEMA, **manifest_to_json(manifest)}))
    return _framed(content, bytes_digest(_canonical(content), key), bool(key))


def decode(stored: bytes, key: bytes = b"") -> Manifest:
    """Read a manifest from its bytes and check every field.

    Raises:
        ManifestError: the manifest is damaged, has another schema, is not signed with ``key``, or has an impossible value.
    """
    try:
        data = json.loads(stored)
        digest, content, is_signed = data["digest"], data["content"], data["is_signed"]
        is_whole = stored == _framed(content, digest, is_signed)
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
        "variants": [{**_sizes(entry.variant), "file": entry.file} for entry in manifest.variants],
        "blobs": {name: {"digest": blob.digest, "bytes": blob.num_bytes} for name, blob in manifest.blobs.items()},
        "costs": [cost_to_json(variant, seconds) for variant, seconds in manifest.costs.items()],
    }


def cost_to_json(variant: ProgramVariant, seconds: float) -> dict[str, int | float]:
    """Return the cost of a variant, in seconds per call, in the form that JSON holds."""
    return {**_sizes(variant), "seconds": seconds}


def _sizes(variant: Any) -> dict[str, int]:
    return asdict(variant)


def is_manifest(stored: bytes) -> bool:
    """Return whether these bytes look like one of our manifests, of any version, damaged or not."""
    words = (b'"digest"', b'"content"', b'"schema"')
    has_fingerprint = b'"fingerprint"' in stored or b'"identity"' in stored  # as schema 4 called it
    return stored.startswith(b"{") and has_fingerprint and all(word in stored for word in words)


def is_blob_name(name: object) -> bool:
    """Return whether this is a plain file name of a blob, without a folder and not hidden."""
    return isinstance(name, str) and _BLOB_NAME.fullmatch(name) is not None and ".." not in name


# -- checks of the fields; a ValueError, TypeError or KeyError names the wrong one


def _checked(content: Mapping[str, Any]) -> Manifest:
    expected = {item.name for item in fields(Manifest)}
    if set(content) != expected:
        raise ValueError(f"fields {sorted(set(content) ^ expected)[:3]} are unknown or missing")
    values = object_of(content["fingerprint"], 64)
    for name, value in values.items():
        text_of(value, f"fingerprint {name!r}", 1 << 16)
    kind = KINDS.get(values.get("kind of model", ""))
    if kind is None:
        raise ValueError(f"the kind of model is {str(values.get('kind of model'))[:40]!r}")
    fingerprint = kind.fingerprint.from_json(values)
    kind.check(content)
    for properties in object_of(content["properties"], 8).values():
        for value in object_of(properties, 256).values():
            if not isinstance(value, (bool, int, float, str)):
                raise ValueError("a property is neither a number nor a string")
    if type(content["few_rows"]) is not int or not 1 <= content["few_rows"] <= MAX_ENTRIES:
        raise ValueError("few_rows is not a number of rows")
    _check_rest(content)
    blobs = _blobs(content)
    parsed = {
        "fingerprint": fingerprint,
        "blobs": blobs,
        "variants": _variants(content, blobs, kind.variant),
        "costs": dict(cost_from_json(cost, kind.variant) for cost in list_of(content["costs"], MAX_ENTRIES)),
    }
    return Manifest(**{**content, **parsed})


def _check_decoder(content: Mapping[str, Any]) -> None:
    _check_config(object_of(content["config"], 64))
    check_one_of(content["programs"], get_args(ProgramLayout), "programs")
    check_one_of(content["kv_type"], get_args(KVType), "type of KV slots")
    check_shape(object_of(content["shape"], 64))
    parts = object_of(content["properties"], 8)
    for part in parts:
        check_one_of(part, (*get_args(Phase), "few_rows"), "part")
    needed = (*get_args(Phase), *(("few_rows",) if content["programs"] == "few_rows" else ()))
    if missing := [part for part in needed if part not in parts]:
        raise ValueError(f"properties has no part {missing[0]!r}")


def _check_encoder(content: Mapping[str, Any]) -> None:
    check_encoder_choices(object_of(content["config"], 64))
    check_one_of(content["programs"], ("separate", "shared"), "programs")
    check_one_of(content["kv_type"], ("",), "type of KV slots")
    check_encoder_shape(object_of(content["shape"], 64))
    if set(object_of(content["properties"], 8)) != {"encode"}:
        raise ValueError("the properties are not those of an encoder")


@dataclass(frozen=True)
class StoredKind:
    """How sets of one kind of model are read. ``check`` raises for a field of a manifest that is impossible for the kind."""

    fingerprint: type[Fingerprint]
    variant: type[Any]
    check: Callable[[Mapping[str, Any]], None]


KINDS: dict[str, StoredKind] = {
    "decoder": StoredKind(StepFingerprint, Variant, _check_decoder),
    "encoder": StoredKind(EncoderFingerprint, EncoderVariant, _check_encoder),
}
"""The kinds of models whose sets can be read, by their names."""


def _check_config(config: Mapping[str, Any]) -> None:
    if unknown := set(config) - set(LAYOUT_FIELDS):
        raise ValueError(f"config has {sorted(unknown)[0]!r}")
    if missing := set(LAYOUT_FIELDS) - set(config):
        raise ValueError(f"config has no {sorted(missing)[0]!r}")
    StaticLLMConfig(**config)


def _blobs(content: Mapping[str, Any]) -> dict[str, StoredBlob]:
    blobs = object_of(content["blobs"], MAX_ENTRIES)
    for name, entry in blobs.items():
        if not is_blob_name(name):
            raise ValueError(f"{name[:80]!r} is not a plain file name")
        if set(object_of(entry, 2)) != {"digest", "bytes"} or not _DIGEST.fullmatch(
            text_of(entry["digest"], "digest", 64)
        ):
            raise ValueError(f"blob {name!r} has no digest or no size")
        whole_of(entry["bytes"], 0, MAX_BLOB_BYTES)
    return {name: StoredBlob(entry["digest"], entry["bytes"]) for name, entry in blobs.items()}


def _variants(content: Mapping[str, Any], blobs: Mapping[str, StoredBlob], kind: type[V]) -> tuple[VariantFile, ...]:
    found = []
    for entry in list_of(content["variants"], MAX_ENTRIES):
        values = dict(object_of(entry, 8))
        file = values.pop("file", None)
        if file not in blobs:
            raise ValueError("a variant has no blob")
        found.append(VariantFile(_variant(values, kind), file))
    verification = content["verification"]
    if not found and (not isinstance(verification, dict) or verification.get("is_ok")):
        raise ValueError("it has no variants")
    return tuple(found)


def _variant(values: dict[str, Any], kind: type[V]) -> V:
    if set(values) != {item.name for item in fields(kind)}:  # type: ignore[arg-type]
        raise ValueError("a variant has unknown sizes, or lacks one")
    for name, value in values.items():
        whole_of(value, 0 if name in kind.may_be_zero else 1)
    return kind(**values)


def _check_rest(content: Mapping[str, Any]) -> None:
    check_flag(content["is_weightless"])
    check_flag(content["is_encrypted"])
    text_of(content["created"], "created", 64)
    for name, value in object_of(content["passes"] or {}, 1024).items():
        text_of(value, f"pass {name}", 64)
    if content["verification"] is not None:
        found = object_of(content["verification"], 64)
        check_flag(found["is_ok"])
        for name in ("agreement", "distance"):
            value = found.get(name, 0.0)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"{name} is not a number")
        text_of(found.get("reason", ""), "reason", 4096)


def cost_from_json(cost: object, kind: type[V]) -> tuple[V, float]:
    """Return the variant, of this type, and the seconds per call that ``cost_to_json`` made ``cost`` of.

    Raises:
        ValueError, TypeError: it has another form, or an impossible value.
    """
    values = dict(object_of(cost, 8))
    seconds = values.pop("seconds", None)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < MAX_SIZE:
        raise ValueError("a cost is not in seconds")
    return _variant(values, kind), float(seconds)


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _framed(content: Any, digest: str, is_signed: bool) -> bytes:
    """Return the only byte form of a manifest, so that a flipped bit is detected anywhere, even in white space."""
    frame = {"digest": digest, "is_signed": is_signed, "content": content}
    return json.dumps(frame, indent=1, sort_keys=True).encode() + b"\n"
