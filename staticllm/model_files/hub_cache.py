"""The models in the cache of Hugging Face that can be run: finds them for a list, and removes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from staticllm.errors import ModelError, quoted
from staticllm.model_files.hub import COMMIT, MAIN, MOST_REF, cache_folder
from staticllm.model_files.hub_files import is_gguf_model, quant_of
from staticllm.model_paths import path_kinds as kinds
from staticllm.model_paths.hub_names import HubName
from staticllm.model_paths.path_kind import path_kind
from staticllm.system.files import read_regular

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo, CachedRepoInfo, CachedRevisionInfo, HFCacheInfo


@dataclass(frozen=True)
class PulledModel:
    """A model in the cache: its folder or GGUF file, its kind, bytes on disk, and when it was last read (seconds since 1970)."""

    name: HubName
    path: Path
    kind: str
    num_bytes: int
    used: float
    commit: str
    """The commit of its revision."""
    is_alone: bool
    """Whether it is all that its revision has."""


def pulled_models() -> list[PulledModel]:
    """Return the models that can be run; empty without a cache. Needs ``huggingface_hub``."""
    found = _scan()
    return [] if found is None else [model for repo in _repositories(found) for model in _models_of(repo)]


def remove_pulled(models: Sequence[PulledModel]) -> None:
    """Remove models: a revision as a whole if it has nothing else, else one file, whose bytes no other revision needs.

    Of a link that someone has made to a file elsewhere, only the link is removed.

    Raises:
        ModelError: files cannot be removed.
    """
    found = _scan()
    try:
        if found is not None:
            for repo in _repositories(found):
                own = [model for model in models if model.name.repo == repo.repo_id]
                alone = {model.commit for model in own if model.is_alone}
                if alone:
                    plan = replace(found, repos=frozenset((repo,))).delete_revisions(*alone)
                    replace(plan, blobs=frozenset(blob for blob in plan.blobs if _is_own(blob, repo))).execute()
                for model in own:
                    if not model.is_alone:
                        _remove_file(model, repo)
    except OSError as error:
        raise ModelError(f"{error.filename!r} cannot be removed: {error.strerror or error}") from None
    left = [model for model in models if model.path.exists()]
    if left:
        raise ModelError(f"{quoted(left[0].path)} could not be removed: check its permissions")


def _scan() -> HFCacheInfo | None:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    _correct_references(cache_folder())
    try:
        return scan_cache_dir(cache_folder())
    except (CacheNotFound, ValueError):  # it is not there, or is a file
        return None


def _correct_references(cache: Path) -> None:
    """Take the end of a line out of references to commits: huggingface_hub leaves out a repository that has one."""
    for path in cache.glob("models--*/refs/**/*"):
        with suppress(OSError, ValueError):
            text = "" if path.is_symlink() or not path.is_file() else read_regular(path, MOST_REF).decode("ascii")
            if text != text.strip() and COMMIT.fullmatch(text.strip()):
                path.write_text(text.strip(), "ascii", newline="")


def _repositories(found: HFCacheInfo) -> list[CachedRepoInfo]:
    return sorted((repo for repo in found.repos if repo.repo_type == "model"), key=lambda repo: repo.repo_id)


def _models_of(repo: CachedRepoInfo) -> Iterator[PulledModel]:
    """Yield the models of a repository, those of its main revision first."""
    revisions = sorted(repo.revisions, key=lambda each: (MAIN not in each.refs, each.commit_hash))
    for revision in revisions:
        name = HubName(repo.repo_id, _label(revision))
        kind = path_kind(revision.snapshot_path).kind
        if kind is kinds.OPENVINO:
            used = max((each.blob_last_accessed for each in revision.files), default=0.0)
            yield PulledModel(
                name, revision.snapshot_path, "openvino", revision.size_on_disk, used, revision.commit_hash, True
            )
        else:
            yield from _ggufs(name, revision)


def _label(revision: CachedRevisionInfo) -> str:
    """Return what to write after the @: nothing for the main revision, else a branch or the commit."""
    if MAIN in revision.refs:
        return ""
    return min(revision.refs, default=revision.commit_hash)


def _ggufs(name: HubName, revision: CachedRevisionInfo) -> Iterator[PulledModel]:
    files = {path: each for each in revision.files if is_gguf_model(path := _path_in(revision, each))}
    quants = [quant_of(path) for path in files]
    for path, file in sorted(files.items()):
        quant = quant_of(path)
        is_clear = bool(quant) and quants.count(quant) == 1
        exact = HubName(name.repo, name.revision, quant if is_clear else "", "" if is_clear else path)
        yield PulledModel(
            exact,
            file.file_path,
            "gguf",
            file.size_on_disk,
            file.blob_last_accessed,
            revision.commit_hash,
            len(files) == 1,
        )


def _path_in(revision: CachedRevisionInfo, file: CachedFileInfo) -> str:
    return file.file_path.relative_to(revision.snapshot_path).as_posix()


def _remove_file(model: PulledModel, repo: CachedRepoInfo) -> None:
    files = [file for each in repo.revisions for file in each.files]
    own = next(file for file in files if file.file_path == model.path)
    own.file_path.unlink(missing_ok=True)
    if _is_own(own.blob_path, repo) and sum(file.blob_path == own.blob_path for file in files) == 1:
        own.blob_path.unlink(missing_ok=True)


def _is_own(blob: Path, repo: CachedRepoInfo) -> bool:
    """Return whether a file lies in the folder of a repository, where no one else keeps it."""
    return blob.is_relative_to(repo.repo_path.resolve())
