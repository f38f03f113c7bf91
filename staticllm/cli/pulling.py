"""Brings a model whose name a person wrote in a command: from the cache of Hugging Face, else by a download that is announced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from staticllm.cli.progress import progress
from staticllm.errors import ModelError
from staticllm.model_files.hub import is_complete, located
from staticllm.model_paths.hub_names import HubName, parse_hub_name
from staticllm.model_paths.path_kind import ModelPath, path_kind
from staticllm.model_paths.path_kinds import HUB_NAME, HUB_REVISIONS


def pulled(name: HubName) -> Path:
    """Return the local place of the model that the hub has now, with progress on stderr.

    Raises:
        ModelError: as for ``hub_downloads.pull``.
        ConfigError: a package is missing.
    """
    from staticllm.model_files.hub_downloads import pull

    with progress(f"looking for {name}") as shown:
        return pull(name, lambda line: shown.write(line, err=True), shown)


def brought(path: str, hint: str = "") -> ModelPath:
    """Return what a path or a name has on this computer, after a download if it is a name that is not complete here.

    ``hint`` is added to the message about a name that cannot be had.

    Raises:
        ModelError: as for ``pulled``.
    """
    found = located(path)
    name = parse_hub_name(found.path.as_posix() if not found.title else path)
    if name is None or not (found.kind in (HUB_NAME, HUB_REVISIONS) or (found.title and not is_complete(found))):
        if found.note:
            click.echo(found.note, err=True)
        return found
    try:
        return replace(path_kind(pulled(name)), title=name.title)
    except ModelError as error:
        if (
            found.title or found.kind is HUB_REVISIONS
        ):  # another program has brought it, and it may be all that there is
            return found
        raise ModelError(f"{error}{'' if name.is_prefixed else hint}") from None
