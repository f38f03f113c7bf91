"""Lists the modules of a folder with the first sentence of each docstring, for docs/structure.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def module_table(folder: str) -> str:
    """Return the rows of a Markdown table of the modules in ``folder``, which is relative to the checkout."""
    top = folder.split("/", maxsplit=1)[0]
    rows = []
    for path in sorted((ROOT / folder).glob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if path.name != "__init__.py" or folder == "staticllm":
            rows.append(f"| `{path.relative_to(ROOT / top).as_posix()}` | {first_sentence(text)} |")
    return "\n".join(rows)


def first_sentence(text: str) -> str:
    """Return the text up to the first full stop, on one line."""
    line = " ".join(text.split("\n\n", maxsplit=1)[0].split()).replace("``", "`")
    return re.split(r"(?<=[.!?])\s", line)[0]
