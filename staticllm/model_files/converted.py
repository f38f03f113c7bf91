"""Model directories that were made of GGUF files: each file is converted once, in a child process, and kept in the user's cache.

A folder is named by the digest of the file and of what converts it. So that a start need not read gigabytes, a small file
remembers the digest of each path with its stamp, and another one the digests and stamps of what was written.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import Timeout

from staticllm.children.answers import check
from staticllm.children.child import Child, ChildLostError, last_words, python_command
from staticllm.core import OnProgress, ProgressEvent, Stage
from staticllm.errors import ModelError, quoted
from staticllm.model_files.gguf_architectures import check_architecture
from staticllm.model_files.gguf_header import GGUFHeader, read_gguf_header
from staticllm.system.file_lock import acquire
from staticllm.system.files import open_regular, read_regular, remedy_of, user_cache, whole_file, write_whole
from staticllm.system.long_calls import LOOK_SECONDS, attended, checkpoint, told
from staticllm.system.threads import ThreadPool
from staticllm.wire.file_stamp import stamp_of
from staticllm.wire.held_files import patiently
from staticllm.wire.messages import Kind, Message

FOLDER = "converted"
CHILD = "staticllm.compiler_passes.conversion.child"
FORMAT = "5"
"""Changes when the same file is converted differently."""
NOTES = "notes"
"""The field of the child's answer with what it has assumed, lines for the user."""
MAX_SECONDS = 3600.0
STAGE: Stage = "convert"
FILES = "files.json"
"""The digests and stamps of the files of a converted model, by which one is noticed that others have damaged."""
_MOST_FILES = 1 << 16
STEP_NS = 2 * 10**9
"""The longest step in which file systems count times."""
_CHUNK = 16 << 20
_DIGEST_CHARS = 32
_NOTE_BYTES = 1 << 16
_UNFINISHED = ".unfinished-"
_OLD_SECONDS = 24 * 3600.0
_BITS = {
    "Q2_K": 8.0, "Q3_K": 6.0, "Q4_1": 6.0, "Q4_K": 6.0, "Q5_0": 8.5, "Q5_1": 10.0, "Q5_K": 10.0, "Q6_K": 10.0, "MXFP4": 9.0,
}  # fmt: skip
"""Bits per number of a converted model, with scales and zero points; numbers of other types stay as large as they are."""
SECONDS_TO_HALF, SECONDS_PER_BYTE = 3.0, 10e-9
"""What converting takes until it is shown as half done: something, and more for large files."""
SPARE_BYTES = 64 << 20
"""What a converted model has beside its weights: vocabulary and graph."""


def converted(path: Path, on_progress: OnProgress = lambda event: None) -> Path:
    """Return the model directory of a GGUF file, which is converted if it is new.

    A cache that cannot be written is used as far as it goes.

    Raises:
        ModelError: the file is damaged, one of several parts, or of an architecture or vocabulary that cannot be read; or it
            is new, and the cache has no room or cannot be written.
    """
    folder = user_cache() / FOLDER
    state = _state_of(path)
    note = folder / f"{state.name}.digest"
    digest = _noted(note) if _is_settled(note, state) else None
    if digest is not None and _is_whole(folder / digest):
        with suppress(OSError):
            os.utime(folder / digest)
        return folder / digest
    begin = time.monotonic()
    event = ProgressEvent(STAGE, 1, 1, 0.0, is_done=False)
    on_progress(event)
    header = read_gguf_header(path)
    check_architecture(header)
    num_bytes = max(tensor.offset + tensor.num_bytes for tensor in header.tensors)
    with told(on_progress, event, SECONDS_TO_HALF + num_bytes * SECONDS_PER_BYTE):
        digest = _digest_of(path, num_bytes)
        _check_unchanged(path, state)
        if not _is_whole(folder / digest):
            with _cache_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
                _check_room(path, folder, converted_size(header))
                with _locked(folder / f"{digest}.lock"):
                    if not _is_whole(folder / digest):
                        shutil.rmtree(folder / digest, ignore_errors=True)
                        _convert(path, folder / digest, num_bytes, state)
    with suppress(OSError), whole_file(note) as file:
        file.write(f"{digest}\n{os.path.abspath(path)}".encode("utf-8", "surrogateescape"))  # noqa: PTH100 - links are not followed
    on_progress(ProgressEvent(STAGE, 1, 1, time.monotonic() - begin))
    return folder / digest


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file; what another process converts meanwhile may take long."""
    while True:
        checkpoint()
        try:
            lease = acquire(path, LOOK_SECONDS)
        except Timeout:
            continue
        with lease:
            yield
        return


@contextmanager
def _cache_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"no model can be kept in {quoted(folder)} ({error.strerror or error}): free space there, or set XDG_CACHE_HOME to a "
            "writable folder"
        ) from None


@dataclass(frozen=True)
class _FileState:
    """A file as it is now."""

    name: str
    """Made of the path and the stamp of the file."""
    changed: int
    """When the file was changed last, ns."""


def _state_of(path: Path) -> _FileState:
    try:
        stamp = stamp_of(path)
    except OSError as error:
        raise ModelError(f"{quoted(path)} cannot be read ({error.strerror or error}): {remedy_of(error)}") from None
    values = (str(path.resolve()), stamp, converter())
    return _FileState(sha256(repr(values).encode()).hexdigest()[:_DIGEST_CHARS], stamp[2])


def _check_unchanged(path: Path, state: _FileState, is_same: bool = True) -> None:
    if not is_same or _state_of(path) != state:
        raise ModelError(f"{quoted(path)} was changed while it was converted: wait until it is complete, and try again")


def _is_settled(note: Path, state: _FileState) -> bool:
    """Return whether a note is so much younger than its file that the file's times would show a later change.

    Times move in steps: a change right after the file was read could leave them as they were.
    """
    with suppress(OSError):
        return note.stat().st_mtime_ns - state.changed > STEP_NS
    return False


def converter() -> str:
    return " ".join([FORMAT, *map(version, ("openvino", "openvino-tokenizers"))])


def _noted(note: Path) -> str | None:
    """Return the digest in a note; None if there is none."""
    found = _read_note(note)
    return None if found is None else found[0]


def _read_note(note: Path) -> tuple[str, str] | None:
    """Return the digest in a note and the file that it was made of, "" in notes of older versions; None if it is no note."""
    with suppress(OSError, ValueError):
        text = read_regular(note, _NOTE_BYTES, follow=False).decode("utf-8", "surrogateescape")
        digest, _, path = text.partition("\n")
        if len(digest) == _DIGEST_CHARS and set(digest) <= set("0123456789abcdef"):
            return digest, path
    return None


@dataclass(frozen=True)
class ConvertedModel:
    """A model directory of the cache, the files that it was made of as far as they are known, and when it was last used."""

    folder: Path
    files: tuple[Path, ...]
    num_bytes: int
    used: float


def converted_models() -> list[ConvertedModel]:
    """Return the model directories in the user's cache."""
    folder = user_cache() / FOLDER
    files: dict[str, set[Path]] = {}
    for note in sorted(folder.glob("*.digest")):
        if (found := _read_note(note)) is not None and found[1]:
            files.setdefault(found[0], set()).add(Path(found[1]))
    models = []
    for each in sorted(folder.glob("*/")) if folder.is_dir() else ():
        with suppress(OSError):
            if len(each.name) == _DIGEST_CHARS and each.is_dir():
                size = sum(path.stat().st_size for path in each.rglob("*") if path.is_file())
                models.append(ConvertedModel(each, tuple(sorted(files.get(each.name, ()))), size, each.stat().st_mtime))
    return models


def given_as(directory: Path) -> str:
    """Return what a user calls a model directory: the GGUF file that it was made of, if it is in the user's cache."""
    made = (each for each in converted_models() if each.folder == directory and each.files)
    return str(next((each.files[0] for each in made), directory))


def remove_converted(model: ConvertedModel) -> None:
    """Remove a model directory and its notes.

    Raises:
        ModelError: it cannot be removed.
    """
    folder = model.folder.parent
    with _cache_errors(folder), _locked(folder / f"{model.folder.name}.lock"):
        for note in folder.glob("*.digest"):
            if _noted(note) == model.folder.name:
                note.unlink(missing_ok=True)
        trash = model.folder.with_name(f"{_UNFINISHED}{os.getpid()}.{secrets.token_hex(4)}")
        patiently(partial(model.folder.rename, trash))  # at once, so that no start finds a part of it
        shutil.rmtree(trash, ignore_errors=True)


def _digest_of(path: Path, num_bytes: int) -> str:
    """Return the digest of what converts and of the file up to the end of its last tensor."""
    return file_digest(path, num_bytes, converter().encode())


def file_digest(path: Path, num_bytes: int | None = None, before: bytes = b"") -> str:
    """Return the digest of ``before`` and of a file, or of its first bytes."""
    found = sha256(before)
    left = path.stat().st_size if num_bytes is None else num_bytes
    with open_regular(path) as file:
        while data := file.read(min(_CHUNK, left)):
            found.update(data)
            left -= len(data)
            checkpoint()
    return found.hexdigest()[:_DIGEST_CHARS]


def converted_size(header: GGUFHeader) -> int:
    """Return about how many bytes the weights of a file have when they are converted."""
    sizes = (
        math.prod(tensor.shape) * _BITS[tensor.kind] / 8 if tensor.kind in _BITS else tensor.num_bytes
        for tensor in header.tensors
    )
    return math.ceil(sum(sizes))


def _check_room(path: Path, folder: Path, num_bytes: int) -> None:
    needed = num_bytes + SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ModelError(
            f"{quoted(path)} needs {needed / 1e9:.1f} GB in {quoted(folder)}, which has {free / 1e9:.1f} GB: free space "
            "there, or set XDG_CACHE_HOME to a folder of a larger disk"
        )


def _convert(path: Path, target: Path, num_bytes: int, state: _FileState) -> None:
    """Make the directory of a file as a whole or not at all. ``target`` is named by the digest of what was read before.

    So it must still be there afterwards: the child may have read something else meanwhile. Stamps alone would miss a change where
    a file system has no time of changes, and the digest alone one that was undone.
    """
    lock = target.with_name(f"{target.name}.child.lock")
    with _locked(lock):  # the child of a killed process may still write
        pass
    _remove_unfinished(target)
    scratch = target.with_name(f"{_UNFINISHED}{target.name}.{secrets.token_hex(4)}")
    scratch.mkdir()
    try:
        run_child(path, scratch, lock)
        _check_unchanged(path, state, _digest_of(path, num_bytes) == target.name)
        (scratch / FILES).write_text(json.dumps(_files_of(scratch)), "utf-8")
        patiently(partial(scratch.rename, target))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _files_of(folder: Path) -> dict[str, list[Any]]:
    """Return the digest of each file by its name, and the stamp with which it was read."""
    paths = sorted(each for each in folder.iterdir() if each.name != FILES and each.is_file())
    stamps = [stamp_of(each) for each in paths]  # first: of what changes meanwhile, they are too old
    with ThreadPool(2, "staticllm-files") as pool:
        digests = pool.map(file_digest, paths)
        return {each.name: [digest, *stamp] for each, digest, stamp in zip(paths, digests, stamps, strict=True)}


def _is_whole(folder: Path) -> bool:
    """Return whether a folder has the files that were written, byte for byte.

    A file that has the stamp with which it was read is not read again.
    """
    try:
        known = json.loads(read_regular(folder / FILES, _MOST_FILES, follow=False))
        is_same = all(list(stamp_of(folder / name)) == stamp for name, (_, *stamp) in known.items())
        if not is_same:
            found = {name: each for name, each in _files_of(folder).items() if name in known}
            if {name: each[0] for name, each in found.items()} != {name: each[0] for name, each in known.items()}:
                return False
            with suppress(OSError):
                write_whole(folder / FILES, json.dumps(found).encode())
        return bool(known)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return False


def _remove_unfinished(target: Path) -> None:
    """Remove what killed processes have left: of this model at once, for its lock is held, of others when it is old."""
    for path in target.parent.glob(f"{_UNFINISHED}*"):
        with suppress(OSError):
            is_own = path.name.startswith(f"{_UNFINISHED}{target.name}.")
            if is_own or time.time() - path.stat().st_mtime > _OLD_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def run_child(path: Path, scratch: Path, lock: Path) -> None:
    """Convert in a child process: the readers are not made for damaged files, and the memory is free afterwards.

    The child holds ``lock``, which outlives this process if that is killed.
    """
    if getattr(sys, "frozen", False):
        raise ModelError(
            f"{quoted(path)} cannot be converted by a frozen application: give it a converted model directory"
        )
    errors = scratch / "errors.txt"
    body = {"path": str(path.absolute()), "target": str(scratch.absolute()), "lock": str(lock.absolute())}
    try:
        with Child(python_command(CHILD), has_pipes=True, errors=errors) as child:
            ask = partial(child.ask, Message(Kind.MODEL, body=body), MAX_SECONDS)
            answer = attended(ask, on_leave=child.kill_all)
            check(answer)
            for note in answer.body.get(NOTES, ()):
                warnings.warn(note, RuntimeWarning, stacklevel=2)
    except TimeoutError:
        raise ModelError(
            f"{quoted(path)} was not converted in {MAX_SECONDS:g} s: convert it on a faster machine"
        ) from None
    except ChildLostError as error:
        said = last_words(errors)
        raise ModelError(
            f"the reader crashed on {quoted(path)} (exit code {error.code}): the file is damaged, or does not fit into memory"
            + (f"; {said}" if said else "")
        ) from None
    errors.unlink(missing_ok=True)
