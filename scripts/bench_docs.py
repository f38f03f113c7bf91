"""Writes the results of ``bench.py`` into docs/lab/benchmarks.md: one section for each kind of processor and model.

    python scripts/bench_docs.py build/bench/bench.json

A section stands between two comments that name its processor and model, and a run replaces only its own section.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import bench_report as report
from bench_figures import Figures
from bench_machine import KINDS, Machine
from bench_targets import judge

PAGE = Path(__file__).resolve().parent.parent / "docs" / "lab" / "benchmarks.md"
BEGIN, END, NEW = "<!-- bench: {} -->", "<!-- bench: end of {} -->", "<!-- bench: new sections -->"


def write_docs(result: dict[str, Any], page: Path = PAGE) -> str:
    """Replace the section of a result in the page, or add it, and return the name of the section."""
    key = f"{result['machine']['kind']} {result['model']}"
    text = page.read_text(encoding="utf-8")
    page.write_text(replaced(text, key, section(result)), encoding="utf-8", newline="\n")
    return key


def replaced(page: str, key: str, text: str) -> str:
    """Return a page whose section ``key`` is ``text``.

    Raises:
        ValueError: the page has neither this section nor the place for new ones.
    """
    begin, end = BEGIN.format(key), END.format(key)
    block = f"{begin}\n{text.strip()}\n{end}"
    pattern = re.compile(rf"{re.escape(begin)}\n.*?\n{re.escape(end)}", re.DOTALL)
    if pattern.search(page):
        return pattern.sub(lambda _: block, page)
    if NEW not in page:
        raise ValueError(f"the page has no line {NEW!r}: add it where new sections shall stand")
    return page.replace(NEW, f"{block}\n\n{NEW}")


def section(result: dict[str, Any]) -> str:
    """Return the section of a result in Markdown."""
    machine, figures = Machine(**result["machine"]), Figures(result["figures"])
    names, judged = result["peers"], judge(figures, result["model"])
    parts = [
        f"## {KINDS[machine.kind]}: {result['model']}",
        f"`{result['command']}`, medians of {_rounds(result['rounds'])}. {machine.line}",
        report.markdown(report.medians(figures, names)),
        "\n".join(f"- {line}" for line in report.alone(figures, names)),
        report.markdown(report.ratios(judged)),
        _same(result.get("same_tokens_f32")),
        _prefill(figures),
    ]
    return "\n\n".join(part for part in parts if part)


def _rounds(count: int) -> str:
    return "one round" if count == 1 else f"{count} rounds"


def _same(is_same: bool | None) -> str:
    if is_same is None:
        return ""
    return f"In f32 without quantized activations, the tokens of ours and genai {'are the same' if is_same else '**differ**'}."


def _prefill(figures: Figures) -> str:
    table = report.prefill(figures)
    intro = "Prefill, and the products with the model's matrices alone, in turns:"
    return f"{intro}\n\n{report.markdown(table)}" if table else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path, help="the JSON that bench.py wrote")
    path = parser.parse_args().result
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        print(f"wrote the section {write_docs(result)!r} of {PAGE}")
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"{path}: not a result of bench.py ({type(error).__name__}: {error}): run python scripts/bench.py")


if __name__ == "__main__":
    main()
