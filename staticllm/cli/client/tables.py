"""Tables of text for terminals."""

from __future__ import annotations

from collections.abc import Sequence


def printable(text: object) -> str:
    """Return a text without characters that a terminal obeys, such as escapes; line breaks and tabs stay.

    Names and answers come from models and servers of others.
    """
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in str(text))


def cell(value: object) -> str:
    """Return what a table shows of a value of JSON: "-" if there is none."""
    return "-" if value is None else " ".join(printable(value).split())


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return lines of aligned columns; columns of numbers are aligned to the right."""
    lines = [head, *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(head))]
    is_right = [bool(rows) and all(_is_number(row[index]) for row in rows) for index in range(len(head))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, is_right, strict=True)
        ).rstrip()
        for line in lines
    )


def _is_number(text: str) -> bool:
    return not text or text[0].isdigit() or text == "-"
