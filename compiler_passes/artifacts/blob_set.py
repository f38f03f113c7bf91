"""A blob set is a folder with one blob per program, and a manifest with their variants, their fingerprint and their digests.

Blobs are named after their digests, and the manifest is put in place last, atomically. At every moment the folder holds a whole
set, the previous or the new one, or no finished set. Every byte is compared with its digest before OpenVINO sees it: OpenVINO
would run a blob with a flipped bit, and a truncated file would kill the process.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import openvino as ov
import psutil
from filelock import Timeout

from staticllm.core import Part
from staticllm.devices import type_name
from staticllm.errors import BlobError, last_line, quoted, shown
from staticllm.kinds import KINDS
from staticllm.system.file_lock import acquire
from staticllm.system.files import fill_from, read_regular, whole_file
from staticllm.system.threads import ThreadPool

from .fingerprint import Fingerprint, bytes_digest, pass_digests, pieces_digest, with_article
from .manifest import MAX_MANIFEST, Manifest, ManifestError, StoredBlob, decode, encode, is_blob_name, is_manifest

MANIFEST, LOCK = "manifest.json", ".staticllm.lock"
COSTS = "costs.json"
"""Measured costs of a set's programs (``measurements.py``); not part of the set."""
CRASHES = "crashes.json"
"""Number of crashes with a set (``crashes.py``); not part of the set."""
SCRATCH = ".staticllm-"
"""Prefix of the names of temporary files."""
LOCK_TIMEOUT = 60.0
"""How long to wait for another writer of the same set, in seconds."""
NUM_READS = 2
"""Blobs that are read and verified in parallel."""
READ_TRIES = 3
"""Attempts to read a set, or to lock its folder, while other processes replace it."""
_WRITTEN = re.compile(r"[A-Za-z0-9._-]+-[0-9a-f]{12}\.blob")
PROBED = {"DYNAMIC_QUANTIZATION_GROUP_SIZE", "INFERENCE_PRECISION_HINT", "CACHE_MODE"}
"""Properties set by a probe or by the kind of export rather than by the user."""
Crypt = Callable[[bytes], bytes]
Piece = bytes | memoryview
Blob = bytes | tuple[Piece, ...]
"""The contents of a file, as a whole or in pieces that are never joined in memory."""
Result = TypeVar("Result")


def write_set(
    target: Path, manifest: Manifest, blobs: Mapping[str, Blob], encrypt: Crypt | None = None, key: bytes = b""
) -> Manifest:
    """Write a set to ``target`` in place of an existing one; return its manifest. After an ``OSError`` the old set is kept."""

    def put_blobs() -> Manifest:
        entries = {}
        names = {}
        for name, data in blobs.items():
            pieces = (data,) if isinstance(data, bytes) else data
            stored = (encrypt(b"".join(pieces)),) if encrypt else pieces
            digest = pieces_digest(stored)
            names[name] = f"{name.removesuffix('.blob')}-{digest[:12]}.blob"
            _write(target / names[name], *stored)
            entries[names[name]] = StoredBlob(digest, sum(map(len, stored)))
        return replace(
            manifest,
            blobs=entries,
            variants=tuple(replace(entry, file=names[entry.file]) for entry in manifest.variants),
            is_encrypted=encrypt is not None,
            passes=dict(pass_digests()),
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )

    return _written(target, put_blobs, key)


def copy_set(original: Path, target: Path, key: bytes = b"") -> None:
    """Copy a whole set, verified, or nothing.

    Raises:
        BlobError: no set, or a damaged one.
        OSError: cannot write.
    """
    target.parent.mkdir(parents=True, exist_ok=True)

    def copy(manifest: Manifest) -> None:
        def put_blobs() -> Manifest:
            for name, data in read_stored(original, manifest):
                _write(target / name, data)
            return manifest

        _written(target, put_blobs, key)

    read_steadily(original, copy, key)


def rewrite_manifest(folder: Path, manifest: Manifest, key: bytes = b"") -> None:
    """Replace a set's manifest, to add the result of a verification. Raises ``OSError``."""
    _written(folder, lambda: manifest, key)


def remove_set(folder: Path) -> None:
    """Remove a set. Delete the manifest first, so that readers see no set, then the files."""
    with contextlib.suppress(OSError):
        (folder / MANIFEST).unlink()
    shutil.rmtree(folder, ignore_errors=True)


def is_ours(folder: Path) -> bool:
    """Return whether a folder holds a set, which may be damaged or unfinished. Nothing else may be replaced."""
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
    """Read and check a set's manifest.

    Raises:
        BlobError: none, or damaged, or of another schema or signature.
    """
    path = folder / MANIFEST
    try:
        return decode(read_regular(path, MAX_MANIFEST, follow=False), key)
    except FileNotFoundError:
        raise BlobError(f"no blob set at {quoted(folder)}: export one first (EXPORT_BLOB, staticllm compile)") from None
    except (OSError, MemoryError) as error:
        raise BlobError(f"{shown(str(path))} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except ManifestError as error:
        raise BlobError(f"{quoted(path)} {error}; export the set again") from None


def read_steadily(folder: Path, use: Callable[[Manifest], Result], key: bytes = b"") -> Result:
    """Read the manifest of a set, call ``use``, which reads its blobs, and return its result.

    If the set is replaced meanwhile, both are repeated, up to ``READ_TRIES`` times.

    Raises:
        BlobError: ``read_manifest`` or ``use`` raised it, or the set was replaced every time.
    """
    for _ in range(READ_TRIES):
        manifest = read_manifest(folder, key)
        try:
            return use(manifest)
        except BlobError:
            if read_manifest(folder, key) == manifest:
                raise
    raise BlobError(
        f"the set at {quoted(folder)} was replaced {READ_TRIES} times while it was read: wait for its writer"
    )


def check_kind(folder: Path, manifest: Manifest, kind: str) -> None:
    """Check that a set is of this kind of model, before its other fields are used. Raises ``BlobError``."""
    if manifest.kind != kind:
        raise BlobError(
            f"the blobs in {quoted(folder)} are of {with_article(manifest.kind)}: "
            f"load them with {KINDS[manifest.kind].pipeline}, or give the set of this model"
        )


def check_set(folder: Path, manifest: Manifest, here: Fingerprint) -> None:
    """Check that a set fits the fingerprint ``here`` and has not failed verification. Raises ``BlobError``."""
    other = here.difference(manifest.fingerprint)
    if other is not None:
        raise BlobError(f"the blobs in {quoted(folder)} were made for something else: {other}; export them again")
    if manifest.has_failed_verification:
        raise BlobError(f"{failed_verification_text(folder, manifest)}: export them again, in another precision")


def check_properties(folder: Path, manifest: Manifest, own: Mapping[Part, Mapping[str, Any]]) -> None:
    """Check that a manifest has the user's properties (``own``), apart from ``PROBED``. Raises ``BlobError``."""
    for part, values in manifest.properties.items():
        mine = json_properties(own["generate" if part == "few_rows" else part])
        for name in {*values, *mine} - PROBED:
            if values.get(name) != mine.get(name):
                raise BlobError(
                    f"the blobs in {quoted(folder)} have {name}={str(values.get(name))[:40]}, here it is {mine.get(name)}: "
                    "export them again"
                )


def json_properties(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return properties in the form that JSON holds: numbers, strings and names of types."""
    kept = (bool, int, float, str)
    return {name: value if isinstance(value, kept) else type_name(value) for name, value in properties.items()}


def read_blobs(folder: Path, manifest: Manifest, decrypt: Crypt | None = None) -> dict[str, ov.Tensor]:
    """Read, verify and decrypt every blob, by file name, ``NUM_READS`` at a time: bytes ``[size]``.

    A program that is imported from a tensor shares its memory, so that nothing is copied.

    Raises:
        BlobError: damaged, or unexpectedly encrypted or plain.
    """
    if manifest.is_encrypted != (decrypt is not None):
        what = (
            "encrypted: give CACHE_ENCRYPTION_CALLBACKS"
            if manifest.is_encrypted
            else "not encrypted: leave CACHE_ENCRYPTION_CALLBACKS out"
        )
        raise BlobError(f"the blobs in {quoted(folder)} are {what}")

    def read(name: str) -> ov.Tensor:
        data = _read_verified(folder / name, manifest.blobs[name])
        return data if decrypt is None else tensor_of(_decrypted(folder / name, data.data.tobytes(), decrypt))

    with ThreadPool(NUM_READS, "staticllm-files") as pool:
        return dict(zip(manifest.blobs, pool.map(read, manifest.blobs), strict=True))


def read_stored(folder: Path, manifest: Manifest) -> Iterator[tuple[str, bytes]]:
    """Yield name and stored bytes of every blob, verified.

    Raises:
        BlobError: missing, changed, or too large for memory.
    """
    for name, entry in manifest.blobs.items():
        yield name, _read_verified(folder / name, entry).data.tobytes()


def _read_verified(path: Path, entry: StoredBlob) -> ov.Tensor:
    try:
        size = path.lstat().st_size
        if size != entry.num_bytes:
            raise BlobError(f"{quoted(path)} has {size} bytes, the manifest says {entry.num_bytes}: export it again")
        if size > psutil.virtual_memory().available:
            raise OSError(f"it has {size / 1e9:.1f} GB, more than the free memory")
        data = _empty(size)
        fill_from(path, data.data.data, follow=False)
    except (OSError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or error or "not enough memory"
        raise BlobError(f"{quoted(path)} cannot be read: {reason}") from None
    if bytes_digest(data.data.data) != entry.digest:
        raise BlobError(f"{quoted(path)} is damaged: its contents do not match its digest; export it again")
    return data


def _empty(size: int) -> ov.Tensor:
    return ov.Tensor(ov.Type.u8, ov.Shape([size]))


def _decrypted(path: Path, data: bytes, decrypt: Crypt) -> bytes:
    try:
        return bytes(decrypt(data))
    except Exception as error:  # the user's function may raise anything
        raise BlobError(f"{quoted(path)} cannot be decrypted: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class ImportTarget:
    """The target of an import: the device, OpenVINO's properties, and the weights file of a weightless blob."""

    device: str
    properties: Mapping[str, Any]
    weights: Path | None = None


def tensor_of(data: bytes) -> ov.Tensor:
    """Return a copy of bytes as a tensor ``[size]`` of u8, whose memory an imported program can share."""
    tensor = _empty(len(data))
    tensor.data[:] = np.frombuffer(data, np.uint8)
    return tensor


def import_blob(core: ov.Core, blob: ov.Tensor, target: ImportTarget) -> ov.CompiledModel:
    """Import one program from its blob, whose memory it shares.

    Raises:
        BlobError: the device refused it.
    """
    extra = {"WEIGHTS_PATH": str(target.weights)} if target.weights is not None else {}
    try:
        return core.import_model(blob, target.device, {**target.properties, **extra})
    except RuntimeError as error:
        raise BlobError(f"{target.device} refused a blob: {last_line(error)}") from error


def failed_verification_text(folder: Path, manifest: Manifest) -> str:
    """Return the reason for which a set failed verification, as the beginning of a message."""
    found = manifest.verification or {}
    reason = found.get("reason") or (
        f"{found.get('agreement', 0):.0%} of the tokens agree, logits differ by {found.get('distance', 0):.1e} of their range"
    )
    return f"the blobs in {quoted(folder)} failed verification ({reason})"


def _written(folder: Path, put_blobs: Callable[[], Manifest], key: bytes) -> Manifest:
    """Call ``put_blobs``, write the manifest that it returns, then remove files that the manifest does not name."""
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
    """Create and lock a folder; retry if another writer removes it."""
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
    raise OSError(f"the folder was removed {READ_TRIES} times by another process")


def _named_in(folder: Path) -> set[str]:
    """Return the blob names in the manifest of a set that is about to be replaced; it may be damaged or of another version."""
    try:
        blobs = json.loads(read_regular(folder / MANIFEST, MAX_MANIFEST, follow=False))["content"]["blobs"]
        return {name for name in blobs if is_blob_name(name)}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()


def _remove_leftovers(folder: Path, key: bytes, before: set[str]) -> None:
    """Remove our files that the set does not need: those of a replaced set, or of a writer that failed or died."""
    try:
        needed = set(read_manifest(folder, key).blobs)
    except BlobError:
        if (folder / MANIFEST).exists():
            return  # a damaged manifest does not say which files belong to the set
        needed = set()
    for path in folder.iterdir():
        if path.name not in (MANIFEST, LOCK, COSTS, *needed) and (path.name in before or _is_own_file(path.name)):
            with contextlib.suppress(OSError):
                path.unlink()


def _remove_if_empty(folder: Path) -> None:
    """Remove the folder if only our lock file is left in it."""
    with contextlib.suppress(OSError, Timeout), acquire(folder / LOCK, 0):
        if [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            folder.rmdir()


def _is_own_file(name: str) -> bool:
    """Return whether our writers use this file name. Other files in the folder are left alone."""
    return name in (MANIFEST, LOCK, COSTS, CRASHES) or name.startswith(SCRATCH) or _WRITTEN.fullmatch(name) is not None


def _write(path: Path, *pieces: Piece) -> None:
    """Write a file atomically, with the access rights of the folder."""
    with whole_file(path, prefix=SCRATCH) as file:
        for piece in pieces:
            file.write(piece)
