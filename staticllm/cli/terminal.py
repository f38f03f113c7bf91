"""Text for terminals: lines that a person types, pieces of an answer, and the line of statistics."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import click

PROMPT = "> "
Look = TypeVar("Look")


def printable(text: object) -> str:
    """Return a text without characters that a terminal obeys, such as escapes; line breaks, tabs and joiners stay.

    Names and answers come from models and servers of others.
    """
    return "".join(char if char.isprintable() or char in "\n\t\u200c\u200d" else "\ufffd" for char in str(text))


def cell(value: object) -> str:
    """Return what a table shows of a value of JSON: "-" if there is none."""
    return "-" if value is None else " ".join(printable(value).split())


def show(piece: str) -> None:
    """Write a piece of an answer. A terminal gets none of the escapes that a model may write."""
    sys.stdout.write(printable(piece) if sys.stdout.isatty() else piece)
    sys.stdout.flush()


def line_reader(words: Sequence[str]) -> Callable[[], str]:
    """Return a function that reads one line: with ``prompt_toolkit`` on a terminal, else with ``input``.

    ``prompt_toolkit`` gives arrow keys, Ctrl-R, pasted lines, and the completion of ``words``. The history is not saved.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return lambda: input(PROMPT)
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter

    completer = WordCompleter(list(words), sentence=True)
    session: PromptSession[str] = PromptSession(completer=completer, complete_while_typing=False)
    return lambda: session.prompt(PROMPT)


def look_again(
    look: Callable[[Look | None], Look], lines_of: Callable[[Look, Look | None], Sequence[str]], interval: float,
    count: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Show what ``look`` returns, ``count`` times or endlessly, every ``interval`` seconds. Both functions get the last look."""
    before: Look | None = None
    for number in itertools.count() if count is None else range(count):
        if number:
            time.sleep(interval)
        found = look(before)
        if as_json:
            click.echo(json.dumps(found))
        else:
            if number and sys.stdout.isatty():
                click.clear()
            click.echo("\n".join(lines_of(found, before)))
        before = found


def print_error(error: Exception) -> None:
    """Print an error as one line on stderr."""
    click.echo(f"Error: {error}", err=True)
