"""Tells which arguments of a command are a model and which are text: a path, or what looks like one, is a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from staticllm.cli.pulling import brought
from staticllm.errors import ModelError, quoted
from staticllm.model_dir import demo_model_path
from staticllm.model_paths.arguments import expanded, is_model_name, is_path
from staticllm.model_paths.hub_names import parse_hub_name
from staticllm.model_paths.path_kind import path_kind
from staticllm.model_paths.path_kinds import HUB_NAME

IN_QUOTES = "put a prompt of several words in quotes"
AS_PROMPT = "if it is a prompt, pipe it into the command, or give it after -m MODEL"


@dataclass(frozen=True)
class ModelAndPrompt:
    """The arguments of ``staticllm run``; None for what was not given."""

    model: str | None
    prompt: str | None
    hint: str = ""
    """For a model that is not there."""


def model_and_prompt(
    arguments: Sequence[str], named: str | None, answering: str = "embedded demo model"
) -> ModelAndPrompt:
    """Return what ``[MODEL] [PROMPT]`` are. ``named`` is the model that ``-m`` gives; then the argument is the prompt.

    Args:
        answering: What answers without a model.

    Raises:
        UsageError: there are too many arguments, the model is given twice, or a single word looks like the name of a model.
    """
    first = arguments[0] if arguments else None
    if len(arguments) > 2:
        raise click.UsageError(f"{len(arguments)} arguments, at most a MODEL and a PROMPT: {IN_QUOTES}")
    if named is not None:
        if len(arguments) == 2:
            one_model(arguments[0] if is_path(arguments[0]) else None, named)
            raise click.UsageError(f"2 arguments beside -m {quoted(named)}, which is the model: {IN_QUOTES}")
        return ModelAndPrompt(named, first)
    if len(arguments) == 2:
        return ModelAndPrompt(arguments[0], arguments[1], "" if is_path(arguments[0]) else f", or {IN_QUOTES}")
    if first is not None and is_path(first):
        return ModelAndPrompt(first, None, f"; {AS_PROMPT}")
    if first is not None and is_model_name(first):
        raise click.UsageError(
            f"{quoted(first)} looks like the name of a model, and alone it would be a prompt of the {answering}: give the model "
            f"as a folder, a GGUF file or OWNER/NAME of Hugging Face (staticllm list shows those that are here); {AS_PROMPT}"
        )
    return ModelAndPrompt(None, first)


def one_model(argument: str | None, named: str | None) -> str | None:
    """Return the model that is given as an argument or by ``-m``, None without either; a ``UsageError`` if by both."""
    if argument is not None and named is not None:
        raise click.UsageError(
            f"the model is given twice, as {quoted(argument)} and as -m {quoted(named)}: leave one out"
        )
    return argument if named is None else named


def model_directory(path: str | None, hint: str = "", takes_parts: bool = False) -> str:
    """Return the model directory for ``path``: the directory itself, the folder of the file, or the demo model for None.

    A name on Hugging Face is downloaded if it is not in the cache.

    ``hint`` is added to the message about a path that does not exist.

    Args:
        takes_parts: Whether a model in several graphs is one too.

    Raises:
        ModelError: there is no OpenVINO model; the message says what is there and which command helps.
    """
    if path is None:
        return str(demo_model_path())
    found = brought(expanded(path), hint)
    if not found.is_loadable and not (takes_parts and found.kind.has_parts):
        raise ModelError(found.problem + (hint if found.kind.name == "missing" else ""))
    return str(found.directory)


def folder_of(path: str | None) -> str:
    """Return the folder for ``path``, as ``model_directory``, but check no folder: a command checks its other options first.

    Raises:
        ModelError: ``path`` is a file that is not of an OpenVINO model.
    """
    name = None if path is None else expanded(path)
    if name is None or Path(name).is_file() or path_kind(name).kind is HUB_NAME:
        return model_directory(name)
    return name


def served_name(model: str | None) -> str | None:
    """Return the name by which a server knows a model: that of the folder, if ``model`` is the path of one."""
    if model is None or not is_path(model):
        return model
    found = path_kind(expanded(model))
    name = parse_hub_name(model) if found.kind.name == "missing" else None
    return found.name if found.is_loadable else model if name is None else name.title


def model_and_texts(model: str | None, texts: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return the directory of an encoder, which is the first of ``texts`` unless ``-m`` gives it, and the other texts.

    Raises:
        UsageError: there is no model, it is given twice, or a text is the path of a file.
        ModelError: as for ``model_directory``.
    """
    if model is None and not texts:
        raise click.UsageError("give the directory of an encoder, as the first argument or with -m")
    first, texts = (texts[0], texts[1:]) if model is None else (model, texts)
    directory = model_directory(first, "" if is_path(first) else "; the model comes before the texts")
    for text in filter(is_path, texts):
        found = path_kind(expanded(text))
        if found.is_loadable:
            one_model(text, first)
        if found.path.is_file():
            raise click.UsageError(
                f"{quoted(text)} is a file: give its lines with --file, or pipe its name to use that as a text"
            )
    return directory, texts
