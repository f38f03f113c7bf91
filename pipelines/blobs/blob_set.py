"""A blob set: a folder with one blob per program, and a manifest with their variants, their fingerprint and their digests.

Blobs are named after their digests and the manifest is put in place last, at once: at every moment the folder holds a whole set,
the one before or the new one, or none that was ever finished. Nothing of it reaches OpenVINO before every byte was compared:
below us a flipped bit runs, and a short file ends the process.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import openvino as ov
import psutil
from filelock import Timeout

from staticllm.core import Phase
from staticllm.devices import type_name
from staticllm.errors import BlobError, last_line
from staticllm.files import read_regular, whole_file
from staticllm.pipelines.blobs.file_lock import acquire, locked
from staticllm.pipelines.blobs.fingerprint import Fingerprint, bytes_digest, pass_digests
from staticllm.pipelines.blobs.manifest import (
    MAX_MANIFEST,
    Manifest,
    ManifestError,
    StoredBlob,
    decode,
    encode,
    is_blob_name,
    is_manifest,
)

MANIFEST, LOCK = "manifest.json", ".staticllm.lock"
SCRATCH = ".staticllm-"
"""How the names of files begin that are being written."""
LOCK_TIMEOUT = 60.0
"""Seconds to wait for another process that writes the same set."""
READ_TRIES = 3
_WRITTEN = re.compile(r"[A-Za-z0-9._-]+-[0-9a-f]{12}\.blob")
PROBED = {"DYNAMIC_QUANTIZATION_GROUP_SIZE", "INFERENCE_PRECISION_HINT", "CACHE_MODE"}
"""Properties that a probe, or the way of exporting, chose for a set."""
Crypt = Callable[[bytes], bytes]
Result = TypeVar("Result")


def write_set(
    target: Path, manifest: Manifest, blobs: Mapping[str, bytes], encrypt: Crypt | None = None, key: bytes = b""
) -> Manifest:
    """Write blobs and manifest to the folder ``target``; a set that lies there is replaced. Returns the manifest as written.

    Raises:
        OSError: the disk is full, or the place cannot be written. What was there before is still there.
    """

    def put_blobs() -> Manifest:
        entries, names = {}, {}
        for name, data in blobs.items():
            stored = encrypt(data) if encrypt else data
            digest = bytes_digest(stored)
            names[name] = f"{name.removesuffix('.blob')}-{digest[:12]}.blob"
            _write(target / names[name], stored)
            entries[names[name]] = StoredBlob(digest, len(stored))
        return replace(
            manifest,
            blobs=entries,
            variants=tuple(replace(entry, file=names[entry.file]) for entry in manifest.variants),
            is_encrypted=encrypt is not None,
            passes=dict(pass_digests()),
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )

    return _written(target, put_blobs, key)


def copy_set(source: Path, target: Path, key: bytes = b"") -> None:
    """Copy a set, every byte compared, whole or not at all.

    Raises:
        BlobError: no set lies at ``source``, or it is damaged.
        OSError: ``target`` cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)

    def copy(manifest: Manifest) -> None:
        def put_blobs() -> Manifest:
            for name, data in read_stored(source, manifest):
                _write(target / name, data)
            return manifest

        _written(target, put_blobs, key)

    read_steadily(source, copy, key)


def rewrite_manifest(folder: Path, manifest: Manifest, key: bytes = b"") -> None:
    """Replace the manifest of a set: the result of a verification came in."""
    _written(folder, lambda: manifest, key)


def remove_set(folder: Path) -> None:
    """Remove a set: at once no set lies there, then its files go."""
    with contextlib.suppress(OSError):
        (folder / MANIFEST).unlink()
    shutil.rmtree(folder, ignore_errors=True)


def is_ours(folder: Path) -> bool:
    """Whether a folder holds a set, perhaps a damaged one, or one that was never finished; nothing else may be replaced."""
    try:
        if folder.is_symlink() or not folder.is_dir():
            return False
        names = [path.name for path in folder.iterdir()]
        if MANIFEST in names:
            return is_manifest(read_regular(folder / MANIFEST, MAX_MANIFEST, follow=False))
    except (OSError, ValueError):
        return False
    return LOCK in names and all(map(_is_own_file, names))


def read_manifest(folder: Path, key: bytes = b"") -> Manifest:
    """The manifest of a set, whole and unchanged.

    Raises:
        BlobError: no set lies there, or its manifest is damaged, of another schema, or signed otherwise.
    """
    path = folder / MANIFEST
    try:
        return decode(read_regular(path, MAX_MANIFEST, follow=False), key)
    except FileNotFoundError:
        raise BlobError(f"no blob set at {str(folder)!r}: export one first (EXPORT_BLOB, staticllm compile)") from None
    except (OSError, MemoryError) as error:
        raise BlobError(f"{str(path)!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except ManifestError as error:
        raise BlobError(f"{str(path)!r} {error}; export the set again") from None


def read_steadily(folder: Path, use: Callable[[Manifest], Result], key: bytes = b"") -> Result:
    """Give the manifest of a set to ``use``, which reads its blobs; again if the set was replaced meanwhile.

    Raises:
        BlobError: as ``read_manifest`` and ``use``.
    """
    for _ in range(READ_TRIES):
        manifest = read_manifest(folder, key)
        try:
            return use(manifest)
        except BlobError:
            if read_manifest(folder, key) == manifest:
                raise
    raise BlobError(f"the set at {str(folder)!r} is replaced again and again: wait for its writer")


def check_set(folder: Path, manifest: Manifest, here: Fingerprint) -> None:
    """Check that a set is for what is to be loaded ``here``.

    Raises:
        BlobError: the set is for another model, machine or layout, or it failed verification.
    """
    other = here.difference(manifest.fingerprint)
    if other is not None:
        raise BlobError(f"the blobs in {str(folder)!r} are not for this: {other}; export them again")
    if manifest.has_failed_verification:
        raise BlobError(f"{failed_verification_text(folder, manifest)}: export them again, in another precision")


def check_properties(folder: Path, manifest: Manifest, own: Mapping[Phase, Mapping[str, Any]]) -> None:
    """Check the properties in a manifest: a probe may have chosen some of them, all others must be the user's (``own``).

    Raises:
        BlobError: one of the others differs.
    """
    for part, values in manifest.properties.items():
        phase: Phase = "prefill" if part == "prefill" else "generate"
        mine = json_properties(own[phase])
        for name in {*values, *mine} - PROBED:
            if values.get(name) != mine.get(name):
                raise BlobError(
                    f"the blobs in {str(folder)!r} ask for {name}={str(values.get(name))[:40]}, here it is {mine.get(name)}: "
                    "export them again"
                )


def json_properties(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Properties as JSON holds them: numbers, texts and names of types."""
    kept = (bool, int, float, str)
    return {name: value if isinstance(value, kept) else type_name(value) for name, value in properties.items()}


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
        BlobError: one is missing, cut short or changed, or is no ordinary file.
    """
    for name, entry in manifest.blobs.items():
        path = folder / name
        try:
            size = path.lstat().st_size
            if size != entry.num_bytes:
                raise BlobError(f"{str(path)!r} has {size} bytes, the manifest says {entry.num_bytes}: export it again")
            if size > psutil.virtual_memory().available:
                raise OSError(f"{size / 1e9:.1f} GB, more than there is free memory")
            data = read_regular(path, size, follow=False)
        except (OSError, MemoryError) as error:
            reason = getattr(error, "strerror", None) or error or "not enough memory"
            raise BlobError(f"{str(path)!r} cannot be read: {reason}") from None
        if bytes_digest(data) != entry.digest:
            raise BlobError(f"{str(path)!r} is damaged: its digest does not agree; export it again")
        yield name, data


def _decrypted(path: Path, data: bytes, decrypt: Crypt) -> bytes:
    try:
        return bytes(decrypt(data))
    except Exception as error:  # of the user's own
        raise BlobError(f"{str(path)!r} cannot be decrypted: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class ImportTarget:
    """Where a blob is imported: the device, OpenVINO's properties, and the weights file of a weightless blob."""

    device: str
    properties: Mapping[str, Any]
    weights: Path | None = None


def import_blob(core: ov.Core, blob: bytes, target: ImportTarget) -> ov.CompiledModel:
    """One program from its bytes.

    Raises:
        BlobError: the device refused it.
    """
    extra = {"WEIGHTS_PATH": str(target.weights)} if target.weights is not None else {}
    try:
        return core.import_model(io.BytesIO(blob), target.device, {**target.properties, **extra})
    except RuntimeError as error:
        raise BlobError(f"{target.device} refused a blob: {last_line(error)}") from error


def failed_verification_text(folder: Path, manifest: Manifest) -> str:
    """What the verification of a set found wrong, for a message."""
    found = manifest.verification or {}
    reason = found.get("reason") or (
        f"{found.get('agreement', 0):.0%} of the tokens agree, logits {found.get('distance', 0):.1e} of their range off"
    )
    return f"the blobs in {str(folder)!r} failed verification ({reason})"


def _written(folder: Path, put_blobs: Callable[[], Manifest], key: bytes) -> Manifest:
    """Write what ``put_blobs`` writes, then the manifest that it returns, then remove what no manifest names."""
    try:
        with _alone_in(folder):
            before = _named_in(folder)
            try:
                manifest = put_blobs()
                _write(folder / MANIFEST, encode(manifest, key))
            finally:
                _remove_leftovers(folder, key, before)
    except Timeout:
        raise OSError(f"another process has been writing to it for {LOCK_TIMEOUT:g} s") from None
    except BaseException:
        _remove_if_empty(folder)
        raise
    return manifest


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is made. A writer that failed may have taken folder and lock away meanwhile."""
    for _ in range(READ_TRIES):
        folder.mkdir(exist_ok=True)
        try:
            lease = acquire(folder / LOCK, LOCK_TIMEOUT)
        except FileNotFoundError:
            continue
        if not (folder / LOCK).exists():
            lease.release()
            continue
        try:
            yield
        finally:
            lease.release()
        return
    raise OSError("the folder is removed again and again")


def _named_in(folder: Path) -> set[str]:
    """Blobs of a set, whole or not, of any version, that is about to be replaced."""
    try:
        blobs = json.loads(read_regular(folder / MANIFEST, MAX_MANIFEST, follow=False))["content"]["blobs"]
        return {name for name in blobs if is_blob_name(name)}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()


def _remove_leftovers(folder: Path, key: bytes, before: set[str]) -> None:
    """Remove files of ours that the set does not need: of one that was replaced, or of a writer that failed or died."""
    try:
        needed = set(read_manifest(folder, key).blobs)
    except BlobError:
        if (folder / MANIFEST).exists():
            return  # a damaged manifest does not tell what belongs to the set
        needed = set()
    for path in folder.iterdir():
        if path.name not in (MANIFEST, LOCK, *needed) and (path.name in before or _is_own_file(path.name)):
            with contextlib.suppress(OSError):
                path.unlink()


def _remove_if_empty(folder: Path) -> None:
    """A writer failed: where nothing but its lock is left, and no other writer has that, the folder goes."""
    with contextlib.suppress(OSError, Timeout), locked(folder / LOCK, 0):
        if [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            folder.rmdir()


def _is_own_file(name: str) -> bool:
    """Whether this is what our writers call files: others may lie beside."""
    return name in (MANIFEST, LOCK) or name.startswith(SCRATCH) or _WRITTEN.fullmatch(name) is not None


def _write(path: Path, data: bytes) -> None:
    """Put a file in its place, as a whole or not at all, with the access rights of the folder."""
    with whole_file(path, prefix=SCRATCH) as file:
        file.write(data)
