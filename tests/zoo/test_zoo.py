"""Compares every model in the zoo with its original: logits and greedy tokens, with separate and shared programs, in blocks,
and in pages.

``STATICLLM_ZOO`` names the folder: any other may be tried with the same checks. What is found must be in
``docs/reference/architectures.md``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from staticllm.errors import UnsupportedModelError
from staticllm.pipelines.diagnostics import decoder_diagnosis
from staticllm.pipelines.diagnostics.decoder_diagnosis import CHUNKS, DecoderDiagnosis

pytestmark = pytest.mark.usefixtures("shared_programs")

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = Path(os.environ.get("STATICLLM_ZOO", ROOT.parent / "shared" / "zoo"))
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/openvino_model.xml")) or ["none"]


def table_row(name):
    """Return the cells of a model's line in docs/reference/architectures.md; None if the model is not in the table."""
    text = (ROOT / "docs" / "reference" / "architectures.md").read_text(encoding="utf-8")
    found = re.search(rf"^\| {re.escape(name)} \|(.*)\|$", text, re.MULTILINE)
    return found and [cell.strip() for cell in found[1].split("|")]


QUICK = ("lfm2",)  # tests/cpu/programs/test_equality.py runs the others
NOT_IN_PAGES = ("granitemoehybrid", "lfm2")
"""Models with recurrent states."""
IN_EVERY_LAYOUT = ("bloom", "gemma2", "lfm2", "llama")
"""A table of distances, windows, recurrent states, and none of these: with ``--all``, these models run in every layout."""
LAYOUTS = ((("separate", 16), ("shared", 64)), (("separate", 64), ("shared", 16)))
EVERY_LAYOUT = tuple((mode, chunk) for mode in ("separate", "shared") for chunk in CHUNKS)


def layouts_of(name, in_full):
    """Return the modes and chunks in which a model runs: both modes, and both sizes of chunks, in turns."""
    return EVERY_LAYOUT if in_full and name in IN_EVERY_LAYOUT else LAYOUTS[NAMES.index(name) % 2 if in_full else 0]


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_a_model_computes_what_the_original_computes(name, zoo, in_full, original, monkeypatch):
    """Each kind of programs and each size of chunks at least once; `scripts/models_table.py` runs all of them."""
    # the cached original, which runs once and not per layout
    monkeypatch.setattr(decoder_diagnosis, "StatefulReference", original)
    row, layouts = table_row(name), layouts_of(name, in_full)
    try:
        job = DecoderDiagnosis().job(zoo / name, "CPU", {})
        verdicts = [v for mode, chunk in layouts for v in DecoderDiagnosis(chunks=(chunk,)).verdicts(job, (mode,))]
        in_blocks = list(DecoderDiagnosis(chunks=(16,)).verdicts(job, ("blocks",)))
        in_pages = [] if name in NOT_IN_PAGES else list(DecoderDiagnosis(chunks=(16,)).verdicts(job, ("paged",)))
    except UnsupportedModelError as error:
        assert "\n" not in str(error)
        assert row is not None, "the table does not say that this model is refused"
        assert row[0] == f"refused by `{error.stage}`", "the table names another pass"
        return
    bad = [verdict for verdict in (*verdicts, *in_blocks, *in_pages) if not verdict.is_ok]
    assert len(verdicts) in (len(layouts) * 4, len(layouts) * 6), verdicts
    assert not bad, bad
    count = len(verdicts) * len(EVERY_LAYOUT) // len(layouts)
    assert row is None or row[:2] == [f"{count} of {count}", "ok"], (
        "python scripts/models_table.py writes the table again"
    )
