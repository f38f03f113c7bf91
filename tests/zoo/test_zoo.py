"""Every model directory in the zoo against its original: logits and greedy tokens, separate and shared programs.

``STATICLLM_ZOO`` names the folder: any other may be tried with the same checks. ``docs/models.md`` must say what is found here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from staticllm.errors import UnsupportedModelError
from staticllm.pipelines.diagnostics.verify import verify_model

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = Path(os.environ.get("STATICLLM_ZOO", ROOT.parent / "shared" / "zoo"))
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/openvino_model.xml")) or ["none"]


def table_row(name):
    """The cells of a model in docs/models.md; None if it is not in it."""
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    found = re.search(rf"^\| {re.escape(name)} \|(.*)\|$", text, re.MULTILINE)
    return found and [cell.strip() for cell in found[1].split("|")]


QUICK = ("llama", "lfm2")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_a_model_says_what_the_original_says(name, zoo):
    row = table_row(name)
    try:
        verdicts = list(verify_model(zoo / name))
    except UnsupportedModelError as error:
        assert "\n" not in str(error)
        assert row is not None and row[0] == f"refused by `{error.stage}`", "only what the table says is refused"
        return
    bad = [verdict for verdict in verdicts if not verdict.is_ok]
    assert len(verdicts) in (2 * 2 * 4, 2 * 2 * 5) and not bad, bad
    assert row is None or row[:2] == [f"{len(verdicts)} of {len(verdicts)}", "ok"], (
        "python scripts/models_table.py writes the table anew"
    )
