"""Every model directory in the zoo against its original: logits and greedy tokens, separate and shared programs.

``STATICLLM_ZOO`` names the folder: any other may be tried with the same checks. ``docs/models.md`` must say what is found here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from staticllm.errors import UnsupportedModelError
from staticllm.pipelines.diagnostics import verify as verification
from staticllm.pipelines.diagnostics.verify import CHUNKS, verify_model

pytestmark = pytest.mark.usefixtures("shared_programs")

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = Path(os.environ.get("STATICLLM_ZOO", ROOT.parent / "shared" / "zoo"))
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/openvino_model.xml")) or ["none"]


def table_row(name):
    """The cells of a model in docs/models.md; None if it is not in it."""
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    found = re.search(rf"^\| {re.escape(name)} \|(.*)\|$", text, re.MULTILINE)
    return found and [cell.strip() for cell in found[1].split("|")]


QUICK = ("lfm2",)  # the others are spoken with in tests/cpu/test_equality.py
QUICK_LAYOUTS = (("separate", 16), ("shared", 64))
EVERY_LAYOUT = tuple((mode, chunk) for mode in ("separate", "shared") for chunk in CHUNKS)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_a_model_says_what_the_original_says(name, zoo, in_full, original, monkeypatch):
    """The quick tests try each kind of programs and each size of chunks once."""
    monkeypatch.setattr(verification, "StatefulReference", original)  # asked once, not for each layout
    row, layouts = table_row(name), EVERY_LAYOUT if in_full else QUICK_LAYOUTS
    try:
        verdicts = [
            verdict for mode, chunk in layouts for verdict in verify_model(zoo / name, "CPU", (mode,), (chunk,))
        ]
    except UnsupportedModelError as error:
        assert "\n" not in str(error)
        assert row is not None and row[0] == f"refused by `{error.stage}`", "only what the table says is refused"
        return
    bad = [verdict for verdict in verdicts if not verdict.is_ok]
    assert len(verdicts) in (len(layouts) * 4, len(layouts) * 6) and not bad, bad
    count = len(verdicts) * len(EVERY_LAYOUT) // len(layouts)
    assert row is None or row[:2] == [f"{count} of {count}", "ok"], (
        "python scripts/models_table.py writes the table anew"
    )
