"""Models by their names on Hugging Face: where they are in its cache on this machine. Nothing is downloaded here."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from staticllm.model_paths.hub_names import HubName, parse_hub_name
from staticllm.model_paths.path_kind import MODEL_XML, TOKENIZER_XML, ModelPath, path_kind
from staticllm.model_paths.path_kinds import HUB_NAME
from staticllm.sources.hub_files import chosen_gguf, is_gguf_model

_INCOMPLETE = ("nothing", "empty", "tokenizer", "no tokenizer", "subfolder")
"""Kinds of snapshots of which only some files were brought."""
_MOST_FILES = 4096


def located(path: str | os.PathLike[str], needs_tokenizer: bool = False) -> ModelPath:
    """Return what a path holds, or what a name has in the cache of Hugging Face; a path that exists comes first.

    A name that is not in the cache keeps the kind ``HUB_NAME``, whose remedy is the command that brings it. No network is used.
    """
    found = path_kind(path, needs_tokenizer)
    name = parse_hub_name(found.path.as_posix()) if found.kind is HUB_NAME else None
    if name is None or (place := cached(name)) is None:
        return found
    here = path_kind(place, needs_tokenizer)
    if here.is_loadable:
        return replace(here, title=name.title)
    return found if here.kind.name in _INCOMPLETE else replace(here, path=found.path, directory=found.path)


def is_complete(found: ModelPath) -> bool:
    """Return whether a model of the cache that can be loaded has all of its files: another program may have brought some."""
    needed = (MODEL_XML, str(Path(MODEL_XML).with_suffix(".bin")), *TOKENIZER_XML)
    return found.is_converted or all((found.directory / name).is_file() for name in needed)


def cached(name: HubName) -> Path | None:
    """Return the folder or the GGUF file that a name has in the cache; None if it is not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    found: str | None
    try:
        found = snapshot_download(name.repo, revision=name.revision or None, local_files_only=True)
    except LocalEntryNotFoundError as error:  # newer versions say where the part is that was brought
        found = getattr(error, "snapshot_path", None)
    except (HFValidationError, OSError, ValueError):
        return None
    return None if found is None else gguf_or_snapshot(name, Path(found))


def gguf_or_snapshot(name: HubName, snapshot: Path) -> Path | None:
    """Return the GGUF file that a name means in a snapshot, or the snapshot; None if it means a file that is not there."""
    if name.file:
        return snapshot / name.file if (snapshot / name.file).is_file() else None
    if not name.quant and (snapshot / MODEL_XML).is_file():
        return snapshot
    files = [path.relative_to(snapshot).as_posix() for path in sorted(snapshot.rglob("*.gguf"))[:_MOST_FILES]]
    meant = chosen_gguf([each for each in files if is_gguf_model(each)], name.quant)
    if len(meant) == 1:
        return snapshot / meant[0]
    return None if name.quant else snapshot


def cache_folder() -> Path:
    """Return the cache of Hugging Face, as its own variables say."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def repository_folder(repo: str) -> Path:
    """Return the folder of a repository in the cache; it may not exist."""
    return cache_folder() / f"models--{repo.replace('/', '--')}"
