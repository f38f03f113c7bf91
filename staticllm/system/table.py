"""Tables of text: aligned columns for a terminal, and Markdown. Columns of numbers are aligned to the right."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return lines of aligned columns. Each row has as many cells as ``head``."""
    return "\n".join("  ".join(line).rstrip() for line in _padded(head, rows))


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown. Each row has as many cells as ``head``."""
    first, *others = _padded(head, rows)
    is_right = _are_numbers(head, rows)
    rule = ["-" * max(2, len(text) - right) + ":" * right for text, right in zip(first, is_right, strict=True)]
    return [f"| {' | '.join(cells)} |" for cells in (first, rule, *others)]


def _padded(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the cells of all lines, those of one column equally wide."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    is_right = _are_numbers(head, rows)
    return [
        [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, is_right, strict=True)
        ]
        for line in lines
    ]


def _are_numbers(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    """Return for each column whether its cells are numbers, with or without sign and unit, or empty."""
    return [bool(rows) and all(_is_number(row[index]) for row in rows) for index in range(len(head))]


def _is_number(text: str) -> bool:
    number = text.lstrip("+-")
    return not number or number[0].isdigit()
