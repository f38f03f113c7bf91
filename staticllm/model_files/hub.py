"""Models by their names on Hugging Face: where they are in its cache on this machine. Nothing is downloaded here."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from staticllm.model_files.hub_files import DEFAULT_QUANT, chosen_gguf, is_gguf_model, quant_of
from staticllm.model_paths.hub_names import HubName, parse_hub_name
from staticllm.model_paths.path_kind import MODEL_XML, TOKENIZER_XML, ModelPath, name_in, path_kind
from staticllm.model_paths.path_kinds import HUB_NAME, HUB_REVISIONS
from staticllm.system.files import read_regular

MAIN = "main"

_INCOMPLETE = ("nothing", "empty", "tokenizer", "no tokenizer", "subfolder")
"""Kinds of snapshots of which only some files were brought."""
_MOST_FILES, _MOST_SHOWN, MOST_REF = 4096, 8, 1024
COMMIT = re.compile(r"[0-9a-f]{40}")


def located(path: str | os.PathLike[str], needs_tokenizer: bool = False) -> ModelPath:
    """Return what a path holds, or what a name has in the cache of Hugging Face; a path that exists comes first.

    A name that is not in the cache keeps the kind ``HUB_NAME``, whose remedy is the command that brings it. No network is used.
    """
    found = path_kind(path, needs_tokenizer)
    name = parse_hub_name(name_in(found.given or found.path)) if found.kind is HUB_NAME else None
    if name is None:
        return found
    snapshots = snapshots_of(name)
    if len(snapshots) > 1:
        choices = ", ".join(str(replace(name, revision=each.name)) for each in snapshots[:_MOST_SHOWN])
        return replace(found, kind=HUB_REVISIONS, found=choices)
    place = gguf_or_snapshot(name, snapshots[0]) if snapshots else None
    if place is None:
        return found
    here = path_kind(place, needs_tokenizer)
    if here.is_loadable:
        return _noted(replace(here, title=name.title), name, snapshots[0])
    return (
        found
        if here.kind.name in _INCOMPLETE
        else replace(here, path=found.path, directory=found.path, given=found.given)
    )


def _noted(found: ModelPath, name: HubName, snapshot: Path) -> ModelPath:
    """Return a model of a snapshot with a note, if the name does not say which revision or which file it is."""
    exact = name
    if found.is_converted and not name.file and not name.quant:
        file = found.path.relative_to(snapshot).as_posix()
        quant = quant_of(file)
        exact = replace(name, quant=quant) if quant else replace(name, file=file)
    is_main = bool(name.revision) or _commit_of(name) == snapshot.name
    exact = exact if is_main else replace(exact, revision=snapshot.name)
    if exact == name:
        return found
    is_guess = not is_main or exact.quant != DEFAULT_QUANT
    return replace(found, note=f"{name} is {exact} here", is_guess=is_guess)


def is_complete(found: ModelPath) -> bool:
    """Return whether a model of the cache that can be loaded has all of its files: another program may have brought some."""
    needed = (MODEL_XML, str(Path(MODEL_XML).with_suffix(".bin")), *TOKENIZER_XML)
    return found.is_converted or all((found.directory / name).is_file() for name in needed)


def snapshots_of(name: HubName) -> list[Path]:
    """Return the snapshot of a name in the cache; without a revision and a known main one all that there are; [] for none."""
    folder = repository_folder(name.repo) / "snapshots"
    revision = _commit_of(name) or name.revision
    if revision:
        return [folder / revision] if (folder / revision).is_dir() else []
    try:
        return sorted(path for path in folder.iterdir() if COMMIT.fullmatch(path.name) and path.is_dir())
    except OSError:
        return []


def _commit_of(name: HubName) -> str:
    """Return the commit that the cache has noted for a revision, of a name without one for the main one; "" if none is."""
    try:
        text = read_regular(repository_folder(name.repo) / "refs" / (name.revision or MAIN), MOST_REF).decode("ascii")
    except (OSError, ValueError):
        return ""
    return text.strip() if COMMIT.fullmatch(text.strip()) else ""


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
