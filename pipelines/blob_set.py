"""A blob set: a folder with one blob a program and a manifest that says what they are, what for, and what they must digest to.

Written beside its place and renamed into it, all of it or nothing. Nothing of it reaches OpenVINO before every byte was compared:
below us a flipped bit runs, and a short file ends the process.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import openvino as ov

from staticllm.core import MaskKind, ModelShape, RecurrentState, RowState, Variant
from staticllm.errors import BlobError
from staticllm.pipelines.identity import Identity, bytes_digest, difference, pass_digests

MANIFEST = "manifest.json"
SCHEMA = 3
SCRATCH = ".staticllm-"
"""What folders are called while they are written. One that is found unlocked was left by a process that died."""
Crypt = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Manifest:
    """What lies in a set. ``blobs``: file → digest and bytes. ``tuned``: properties that a probe chose, for each phase.
    ``costs``: measured seconds of variants. ``verification``: what ``compile --verify`` found, or None."""

    identity: Identity
    config: Mapping[str, Any]
    programs: str
    row_type: str
    shape: Mapping[str, Any]
    properties: Mapping[str, Mapping[str, Any]]
    variants: tuple[Mapping[str, Any], ...]
    blobs: Mapping[str, Mapping[str, Any]]
    is_weightless: bool
    is_encrypted: bool
    costs: tuple[tuple[int, int, int, float], ...] = ()
    passes: Mapping[str, str] | None = None
    created: str = ""
    verification: Mapping[str, Any] | None = None

    @property
    def num_bytes(self) -> int:
        return sum(int(blob["bytes"]) for blob in self.blobs.values())

    @property
    def is_bad(self) -> bool:
        """Whether its words were compared with the reference, and are not good enough."""
        return self.verification is not None and not self.verification.get("is_ok")

    def file_of(self) -> dict[Variant, str]:
        return {Variant(v["rows"], v["capacity"], v["sequences"]): v["file"] for v in self.variants}


def write_set(target: Path, manifest: Manifest, blobs: Mapping[str, bytes], encrypt: Crypt | None = None) -> Manifest:
    """Write blobs and manifest to the folder ``target``; a set that lies there is replaced. Returns the manifest as written.

    Raises:
        OSError: the disk is full, or the place cannot be written. What was there before is still there.
    """
    scratch = Path(tempfile.mkdtemp(prefix=f"{SCRATCH}{target.name}.", dir=target.parent))
    try:
        entries = {}
        for name, data in blobs.items():
            stored = encrypt(data) if encrypt else data
            _write(scratch / name, stored)
            entries[name] = {"digest": bytes_digest(stored), "bytes": len(stored)}
        written = _replaced(
            manifest,
            blobs=entries,
            is_encrypted=encrypt is not None,
            passes=dict(pass_digests()),
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )
        _write(scratch / MANIFEST, _encoded(written))
        scratch.chmod(0o755)  # mkdtemp makes it private; a blob set is an ordinary folder
        _rename(scratch, target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return written


def copy_set(source: Path, target: Path) -> None:
    """Copy a set, every byte compared, whole or not at all.

    Raises:
        BlobError: no set lies at ``source``, or it is damaged.
        OSError: ``target`` cannot be written.
    """
    manifest = read_manifest(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{SCRATCH}{target.name}.", dir=target.parent))
    try:
        for name, data in read_stored(source, manifest):
            _write(scratch / name, data)
        _write(scratch / MANIFEST, _encoded(manifest))
        scratch.chmod(0o755)
        _rename(scratch, target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def rewrite_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest of a set: the result of a verification came in."""
    handle, name = tempfile.mkstemp(prefix=SCRATCH, dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_encoded(manifest))
        Path(name).replace(folder / MANIFEST)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a set, whole and unchanged.

    Raises:
        BlobError: no set lies there, or its manifest is damaged or of another schema.
    """
    path = folder / MANIFEST
    try:
        stored = path.read_bytes()
        data = json.loads(stored)
        digest, content = data["digest"], data["content"]
    except FileNotFoundError:
        raise BlobError(f"no blob set at {str(folder)!r}: export one first (EXPORT_BLOB, staticllm compile)") from None
    except OSError as error:
        raise BlobError(f"{str(path)!r} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _damaged(path) from None
    if stored != _framed(content, digest) or digest != bytes_digest(_canonical(content)):
        raise _damaged(path)
    if content.get("schema") != SCHEMA:
        raise BlobError(
            f"{str(path)!r} has schema {content.get('schema')}, this version reads {SCHEMA}: export the set again"
        )
    del content["schema"]
    content["variants"], content["costs"] = tuple(content["variants"]), tuple(map(tuple, content["costs"]))
    return Manifest(**content)


def check_set(folder: Path, manifest: Manifest, here: Identity) -> None:
    """
    Raises:
        BlobError: the set is for another model, machine or layout than ``here``, or its words were found wrong.
    """
    other = difference(here, manifest.identity)
    if other is not None:
        raise BlobError(f"the blobs in {str(folder)!r} are not for this: {other}; export them again")
    if manifest.is_bad:
        raise BlobError(f"{bad(folder, manifest)}: export them again, in another precision")


def read_blobs(folder: Path, manifest: Manifest, decrypt: Crypt | None = None) -> dict[str, bytes]:
    """Every blob of a set, compared with its digest, decrypted.

    Raises:
        BlobError: one is missing, cut short or changed; or the set is encrypted and there is no key.
    """
    if manifest.is_encrypted != (decrypt is not None):
        what = (
            "encrypted: give CACHE_ENCRYPTION_CALLBACKS" if manifest.is_encrypted else "not encrypted: leave them out"
        )
        raise BlobError(f"the blobs in {str(folder)!r} are {what}")
    return {
        name: data if decrypt is None else _decrypted(folder / name, data, decrypt)
        for name, data in read_stored(folder, manifest)
    }


def read_stored(folder: Path, manifest: Manifest) -> Iterator[tuple[str, bytes]]:
    """The bytes of every blob as they are stored, compared with their digests.

    Raises:
        BlobError: one is missing, cut short or changed.
    """
    for name, entry in manifest.blobs.items():
        path = folder / name
        try:
            data = path.read_bytes()
        except OSError as error:
            raise BlobError(f"{str(path)!r} cannot be read: {error.strerror or error}") from None
        if len(data) != entry["bytes"]:
            raise BlobError(f"{str(path)!r} has {len(data)} bytes, the manifest says {entry['bytes']}: export it again")
        if bytes_digest(data) != entry["digest"]:
            raise BlobError(f"{str(path)!r} is damaged: its digest does not agree; export it again")
        yield name, data


def _decrypted(path: Path, data: bytes, decrypt: Crypt) -> bytes:
    try:
        return bytes(decrypt(data))
    except Exception as error:  # of the user's own
        raise BlobError(f"{str(path)!r} cannot be decrypted: {type(error).__name__}: {error}") from error


def import_blob(
    core: ov.Core, data: bytes, device: str, properties: Mapping[str, Any], weights: Path | None
) -> ov.CompiledModel:
    """One program from its bytes; ``weights`` of a weightless one.

    Raises:
        BlobError: the device refused it.
    """
    extra = {"WEIGHTS_PATH": str(weights)} if weights is not None else {}
    try:
        return core.import_model(io.BytesIO(data), device, {**properties, **extra})
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise BlobError(f"{device} refused a blob: {lines[-1] if lines else type(error).__name__}") from error


def shape_to_json(shape: ModelShape) -> dict[str, Any]:
    return asdict(shape)


def shape_from_json(content: Mapping[str, Any]) -> ModelShape:
    values = dict(content)
    values["row_states"] = tuple(RowState(**state) for state in values["row_states"])
    values["masks"] = tuple(MaskKind(**{**kind, "first_seen": tuple(kind["first_seen"])}) for kind in values["masks"])
    values["recurrent_states"] = tuple(
        RecurrentState(**{**state, "shape": tuple(state["shape"])}) for state in values["recurrent_states"]
    )
    return ModelShape(**values)


def remove_leftovers(folder: Path, name: str = "") -> None:
    """Remove what processes that died had begun to write for ``name``. The caller holds the lock of that name."""
    for path in folder.glob(f"{SCRATCH}{name}.*"):
        shutil.rmtree(path, ignore_errors=True)


def bad(folder: Path, manifest: Manifest) -> str:
    """What was found wrong with the words of a set."""
    found = manifest.verification or {}
    reason = found.get("reason") or (
        f"{found.get('agreement', 0):.0%} of the tokens agree, logits {found.get('distance', 0):.1e} of their range off"
    )
    return f"the blobs in {str(folder)!r} were verified and found bad ({reason})"


def _replaced(manifest: Manifest, **changes: Any) -> Manifest:
    return Manifest(**{**{name: getattr(manifest, name) for name in manifest.__dataclass_fields__}, **changes})


def _encoded(manifest: Manifest) -> bytes:
    content = {"schema": SCHEMA, **asdict(manifest)}
    content = json.loads(_canonical(content))
    return _framed(content, bytes_digest(_canonical(content)))


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _framed(content: Any, digest: str) -> bytes:
    """The one way in which a manifest is written: a flipped bit anywhere, be it in a blank, is seen."""
    return json.dumps({"digest": digest, "content": content}, indent=1, sort_keys=True).encode() + b"\n"


def _damaged(path: Path) -> BlobError:
    return BlobError(f"{str(path)!r} is damaged: it is not what was written; export the set again")


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _rename(scratch: Path, target: Path) -> None:
    """Put a finished folder in its place; what lies there goes."""
    if not target.exists():
        scratch.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f"{SCRATCH}{target.name}.", dir=target.parent))
    target.rename(old / "old")
    scratch.rename(target)
    shutil.rmtree(old, ignore_errors=True)
