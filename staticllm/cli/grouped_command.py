"""Commands with many options: their help in groups, rare ones by ``--help-all``, and values from a file by ``--options``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from staticllm.errors import quoted
from staticllm.system.files import read_regular

MAX_BYTES = 1 << 20
Groups = Mapping[str, Sequence[str]]
"""Title of a group → the names of its parameters, without ``--``, in the order of the help."""


class GroupedCommand(click.Command):
    """A command with groups of options.

    The first part of the help holds the options in no group, which are those that most people need. ``groups`` follow it.
    ``rare`` groups are left out of ``--help``, and stand in ``--help-all``; their options work like others.
    """

    def __init__(
        self, *arguments: Any, groups: Groups | None = None, rare: Groups | None = None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.groups = groups or {}
        self.rare = rare or {}
        if self.rare:
            self.params.append(_help_all())

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records: dict[str, list[tuple[str, str]]] = {}
        for each in self.get_params(ctx):
            if isinstance(each, click.Option) and (record := each.get_help_record(ctx)) is not None:
                records.setdefault(str(each.name), []).append(record)
        shown_all = bool(ctx.meta.get(_ALL))
        groups = {**self.groups, **(self.rare if shown_all else {})}
        named = {name for group in (*self.groups.values(), *self.rare.values()) for name in group}
        parts = {"Options": [name for name in records if name not in named], **groups}
        for title, names in parts.items():
            with formatter.section(title):
                formatter.write_dl([record for name in names for record in records.get(name, ())])
        if self.rare and not shown_all:
            count = sum(name in records for group in self.rare.values() for name in group)
            titles = ", ".join(title.lower() for title in self.rare)
            formatter.write_paragraph()
            formatter.write_text(f"--help-all lists {count} rarer options: {titles}.")


_ALL = "staticllm.help_all"


def _help_all() -> click.Option:
    def show(ctx: click.Context, param: click.Parameter, is_asked: bool) -> None:
        if is_asked and not ctx.resilient_parsing:
            ctx.meta[_ALL] = True
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()

    return click.Option(
        ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=show, help="Show rare options, too."
    )


def help_of(command: click.Command, ctx: click.Context) -> str:
    """Return the help of a command with its rare options, for the page about the command line."""
    ctx.meta[_ALL] = True
    return command.get_help(ctx)


def _read(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
    """Make the values of a file the defaults of the command's options; click checks them like those of the command line.

    Raises:
        BadParameter: the file cannot be read, is no JSON object, names an option that the command does not have, or gives one
            an impossible value.
    """
    if path is None or ctx.resilient_parsing:
        return
    try:
        found = json.loads(read_regular(Path(path), MAX_BYTES))
    except OSError as error:
        raise click.BadParameter(f"{quoted(path)} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"{quoted(path)} is no JSON ({error})") from None
    if not isinstance(found, dict):
        raise click.BadParameter(f'{quoted(path)} holds a {type(found).__name__}: must be an object, {{"seed": 7}}')
    names = {name.lstrip("-"): each for each in ctx.command.params for name in each.opts if name.startswith("--")}
    values = {}
    for key, value in found.items():
        option = names.get(key.replace("_", "-"))
        if option is None or not option.expose_value:
            raise click.BadParameter(
                f"{quoted(path)} names {key!r}: this command has no such option; --help-all lists them"
            )
        given = _checked(path, key, value, option)
        values[str(option.name)] = given
        try:
            option.process_value(ctx, given)
        except click.BadParameter as error:
            raise click.BadParameter(f"{quoted(path)}: {key}: {error.message}") from None
    ctx.default_map = {**(ctx.default_map or {}), **values}


def _checked(path: str, key: str, value: Any, option: click.Parameter) -> Any:
    """Return a value of the file as click takes it.

    Raises:
        BadParameter: it is of a type that the option cannot have.
    """
    is_flag = isinstance(option, click.Option) and option.is_flag
    if is_flag != isinstance(value, bool):
        raise click.BadParameter(
            f"{quoted(path)}: {key} is {json.dumps(value)}, must be {'true or false' if is_flag else 'a value'}"
        )
    items = value if option.multiple and isinstance(value, list) else [value]
    if not all(isinstance(item, (str, int, float)) for item in items):
        several = " or a list of them" if option.multiple else ""
        raise click.BadParameter(f"{quoted(path)}: {key} is {json.dumps(value)}, must be a text or a number{several}")
    return [str(item) for item in items] if option.multiple else value if is_flag else str(value)


option_file = click.option(
    "--options",
    type=click.Path(),
    metavar="FILE",
    is_eager=True,
    expose_value=False,
    callback=_read,
    help='Read options from a JSON file, such as {"device": "NPU"}.',
)
"""``--options FILE``, JSON with the names of the options. An option on the command line wins over the file."""
