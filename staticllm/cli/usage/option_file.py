"""Adds ``--options FILE``: a JSON object of option names and values, so that what is always the same is not typed again.

It is JSON because Python 3.10 reads no TOML, and a further package is not worth it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from staticllm.system.files import read_regular

Command = TypeVar("Command", bound=Callable[..., Any])
MAX_BYTES = 1 << 20


def option_file(command: Command) -> Command:
    """Add ``--options FILE`` to a command. An option that is also given on the command line counts from there."""
    option = click.option(
        "--options",
        type=click.Path(),
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=_read,
        help='Read options from a JSON file, such as {"device": "NPU"}.',
    )
    return option(command)


def _read(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
    """Make the values of a file the defaults of the command's options; click checks them like those of the command line.

    Raises:
        BadParameter: the file cannot be read, is no JSON object, names an option that the command does not have, or gives one an
            impossible value.
    """
    if path is None or ctx.resilient_parsing:
        return
    try:
        found = json.loads(read_regular(Path(path), MAX_BYTES))
    except OSError as error:
        raise click.BadParameter(f"{path!r} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"{path!r} is no JSON ({error})") from None
    if not isinstance(found, dict):
        raise click.BadParameter(f'{path!r} holds a {type(found).__name__}: must be an object, {{"seed": 7}}')
    names = {name.lstrip("-"): each for each in ctx.command.params for name in each.opts if name.startswith("--")}
    values = {}
    for key, value in found.items():
        option = names.get(key.replace("_", "-"))
        if option is None or not option.expose_value:
            raise click.BadParameter(f"{path!r} names {key!r}: this command has no such option; --help-all lists them")
        values[str(option.name)] = given = _checked(path, key, value, option)
        try:
            option.process_value(ctx, given)
        except click.BadParameter as error:
            raise click.BadParameter(f"{path!r}: {key}: {error.message}") from None
    ctx.default_map = {**(ctx.default_map or {}), **values}


def _checked(path: str, key: str, value: Any, option: click.Parameter) -> Any:
    """Return a value of the file as click takes it.

    Raises:
        BadParameter: it is of a type that the option cannot have.
    """
    is_flag = isinstance(option, click.Option) and option.is_flag
    if is_flag != isinstance(value, bool):
        raise click.BadParameter(
            f"{path!r}: {key} is {json.dumps(value)}, must be {'true or false' if is_flag else 'a value'}"
        )
    items = value if option.multiple and isinstance(value, list) else [value]
    if not all(isinstance(item, (str, int, float)) for item in items):
        several = " or a list of them" if option.multiple else ""
        raise click.BadParameter(f"{path!r}: {key} is {json.dumps(value)}, must be a text or a number{several}")
    return [str(item) for item in items] if option.multiple else value if is_flag else str(value)
