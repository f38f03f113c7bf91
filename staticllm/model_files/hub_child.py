"""The process that talks with a hub through ``huggingface_hub``, which ``staticllm.model_files.hub_downloads`` starts.

It looks at a repository, and puts files into the cache of Hugging Face, in the layout that ``huggingface_hub`` documents. That
package resumes a download only within one process and does not compare digests, so files are written here: what has arrived
stays in ``blobs/<digest>.incomplete``, and becomes a blob when its digest is the one that the hub named before.
"""

from __future__ import annotations

import io
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha1, sha256
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from staticllm.children.answers import answer_all
from staticllm.errors import ModelError, StaticLLMError
from staticllm.model_files.hub_errors import NoHubError, is_answer, what_failed
from staticllm.model_files.hub_files import HubFile, check_file_name
from staticllm.model_paths.path_kind import MODEL_XML
from staticllm.system.file_lock import acquire
from staticllm.wire.held_files import patiently

CONFIG, MAX_CONFIG = "config.json", 1 << 20
MAX_FILES, MAX_SIZE, MAX_HTTP = 20_000, 1 << 50, 50 * 10**9
CHUNK = 1 << 18
"""Bytes after which what has arrived is written; ``huggingface_hub`` waits for 10 MB, so that a slow download looks like none."""
RETRIES, RETRY_SECONDS = 2, 1.0
_HEX = frozenset("0123456789abcdef")


def look(repo: str, revision: str | None) -> dict[str, Any]:
    """Return the commit, the files and ``config.json`` of a repository, as the hub lists them.

    Raises:
        ModelError: it has impossible files.
        NoHubError: what answers is no hub.
    """
    from huggingface_hub import HfApi, constants

    info = HfApi().model_info(
        repo, revision=revision, files_metadata=True, timeout=float(constants.HF_HUB_ETAG_TIMEOUT)
    )
    siblings = info.siblings or []
    commit = str(info.sha)
    if not _is_hex(commit, 40):
        raise NoHubError
    if len(siblings) > MAX_FILES:
        raise ModelError(f"{repo} has {len(siblings)} files, at most {MAX_FILES} are listed: give another repository")
    files = [_checked(repo, each) for each in siblings]
    names = {file.name: file for file in files}
    has_model = MODEL_XML in names or any(name.endswith(".gguf") for name in names)
    config = "" if has_model or CONFIG not in names else _small(repo, commit, names[CONFIG])
    return {
        "commit": commit,
        "config": config,
        "files": [[each.name, each.size, each.digest, each.is_large] for each in files],
    }


def _checked(repo: str, sibling: Any) -> HubFile:
    name = check_file_name(str(sibling.rfilename), repo)
    lfs = sibling.lfs
    size = sibling.size if lfs is None else lfs.size
    digest = sibling.blob_id if lfs is None else lfs.sha256
    if not isinstance(size, int) or isinstance(size, bool) or not _is_hex(digest, 40 if lfs is None else 64):
        raise NoHubError
    if not 0 <= size <= MAX_SIZE:
        raise ModelError(f"{repo} has a file {name!r} of {size} bytes, which no hub keeps: nothing of it is taken")
    return HubFile(name, size, digest, lfs is not None)


def _is_hex(text: object, length: int) -> bool:
    return isinstance(text, str) and len(text) == length and set(text) <= _HEX


def _small(repo: str, commit: str, file: HubFile) -> str:
    """Return a small text, which only says more about a repository without a model; empty if it cannot be had."""
    if file.size > MAX_CONFIG:
        return ""
    held = io.BytesIO()
    with suppress(Exception):  # the repository may be gated
        _get(repo, commit, file, held, 0)
    return held.getvalue()[:MAX_CONFIG].decode("utf-8", "replace")


def fetch(repo: str, revision: str, commit: str, files: list[HubFile]) -> None:
    """Put files of a commit into the cache, the last one last, and note that the revision is this commit.

    Raises:
        ModelError: another process has removed some of them meanwhile.
    """
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    locks = Path(constants.HF_HUB_CACHE) / ".locks" / folder.name
    snapshot = folder / "snapshots" / commit
    for place in (folder / "blobs", folder / "refs", snapshot, locks):
        place.mkdir(parents=True, exist_ok=True)
    try:
        for file in files:
            with acquire(locks / f"{file.digest}.lock"):
                if not (folder / "blobs" / file.digest).is_file():
                    _download(repo, commit, file, folder / "blobs")
        for file in files:
            _link(folder / "blobs" / file.digest, snapshot, file.name)
        is_whole = all((snapshot / file.name).is_file() for file in files)
    except FileNotFoundError:
        is_whole = False
    if not is_whole:
        raise ModelError(f"files of {repo} were removed while it was downloaded: pull it again")
    if revision != commit:
        reference = folder / "refs" / revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(commit)


def _download(repo: str, commit: str, file: HubFile, blobs: Path) -> None:
    """Write one blob, as a whole or not at all; what has arrived of it stays for the next try."""
    if file.size > MAX_HTTP:
        raise ModelError(
            f"{file.name!r} has {file.size / 1e9:.0f} GB, at most {MAX_HTTP / 1e9:.0f} GB are downloaded: take it with "
            f"hf download {repo} {file.name}"
        )
    partial = blobs / f"{file.digest}.incomplete"
    with _Partial(partial, file) as target:
        _get_rest(repo, commit, file, target)
        size = target.tell()
        is_right = size == file.size and target.digest() == file.digest
    if size < file.size:
        raise ModelError(
            f"{file.name!r} of {repo} ended after {size} of {file.size} bytes: pull it again, which goes on from there"
        )
    if not is_right:
        partial.unlink()
        raise ModelError(
            f"{file.name!r} of {repo} is not what the hub says that it is (another digest): nothing of it was kept, pull it again"
        )
    partial.replace(blobs / file.digest)


def _get_rest(repo: str, commit: str, file: HubFile, target: _Partial) -> None:
    """Write what is missing of a file. A connection that breaks is made again, as long as something arrives."""
    failures = 0
    while (begin := target.tell()) < file.size:
        try:
            _get(repo, commit, file, target, begin)
        except (StaticLLMError, MemoryError):
            raise
        except Exception as error:
            failures = 1 if target.tell() > begin else failures + 1
            if failures > RETRIES or is_answer(error):
                raise
            time.sleep(RETRY_SECONDS)
        else:
            if target.tell() == begin:
                return


class _Partial(io.FileIO):
    """A file that is continued, and never has more bytes than the whole one."""

    def __init__(self, path: Path, file: HubFile) -> None:
        super().__init__(path, "a+b")
        self._file = file
        if self.seek(0, io.SEEK_END) > file.size:  # of a killed process, or of another program
            self.truncate(0)
            self.seek(0)

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self._file.size:
            raise ModelError(f"{self._file.name!r} is longer than the hub says: nothing of it was kept, pull it again")
        left = memoryview(data)
        while left:
            left = left[super().write(left) or 0 :]
        return len(data)

    def digest(self) -> str:
        """Return the digest of all bytes, of the kind that the hub names."""
        found = sha256() if self._file.is_large else sha1(b"blob %d\0" % self._file.size)
        self.seek(0)
        while data := self.read(1 << 20):
            found.update(data)
        return found.hexdigest()


def _get(repo: str, commit: str, file: HubFile, target: Any, begin: int) -> None:
    """Write the bytes of a file from ``begin`` on."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils._headers import build_hf_headers

    constants.DOWNLOAD_CHUNK_SIZE = CHUNK
    url = hf_hub_url(repo, file.name, revision=commit)
    found = get_hf_file_metadata(url, timeout=float(constants.HF_HUB_ETAG_TIMEOUT))
    if found.etag != file.digest or found.size not in (None, file.size):
        raise ModelError(
            f"the hub says two things of {file.name!r} of {repo} (digest {file.digest[:12]} and {str(found.etag)[:12]}): pull it "
            "again, and check HF_ENDPOINT if that does not help"
        )
    headers = build_hf_headers()
    if _origin(found.location) != _origin(url):  # the token is for the hub alone
        headers = {name: value for name, value in headers.items() if name.lower() != "authorization"}
    try:
        http_get(found.location, target, resume_size=begin, headers=headers, expected_size=file.size)
    except OSError as error:
        if "consistency check failed" not in str(error).lower():
            raise


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _link(blob: Path, snapshot: Path, name: str) -> None:
    """Make a file of a snapshot: a link to its blob, or a copy where the system has no links."""
    from huggingface_hub import constants

    path = snapshot / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(path):
        if path.is_file() and path.stat().st_size == blob.stat().st_size:
            return
        path.unlink()
    if not getattr(constants, "HF_HUB_DISABLE_SYMLINKS", False):
        up = [".."] * (len(PurePosixPath(name).parts) + 1)
        with suppress(OSError, NotImplementedError):
            path.symlink_to(Path(*up, "blobs", blob.name))
            return
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    shutil.copyfile(blob, unfinished)
    patiently(partial(unfinished.replace, path))


def _answer(body: Mapping[str, Any]) -> dict[str, Any]:
    if body["action"] == "look":
        return look(body["repo"], body["revision"] or None)
    fetch(body["repo"], body["revision"] or "main", body["commit"], [HubFile(*each) for each in body["files"]])
    return {}


def _failure(error: Exception, body: Mapping[str, Any]) -> ModelError:
    if isinstance(error, MemoryError):
        return ModelError("the hub's answer does not fit into memory: check HF_ENDPOINT")
    return ModelError(what_failed(error, body["repo"], body["revision"]))


def main() -> None:
    answer_all(_answer, _failure)
