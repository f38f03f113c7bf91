"""A command whose help shows its options in groups, the usual ones first; rare ones are shown by ``--help-all``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

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
        self.groups, self.rare = groups or {}, rare or {}
        if self.rare:
            self.params.append(_help_all())

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in their groups."""
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
