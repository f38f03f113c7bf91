"""The lists of passes: every pass is in one, and a list without a pass runs the others."""

from __future__ import annotations

import pytest

from staticllm.compiler_passes.decoder import (
    DECODER,
    DECODER_EMBEDDER,
    DECODER_NPU,
    DECODER_UNMERGED,
    PAGED,
    PAGED_FORMS,
    PAGED_PROOFS,
    with_adapters,
)
from staticllm.compiler_passes.encoder import ENCODER
from staticllm.compiler_passes.lower import lower
from staticllm.compiler_passes.pass_pipeline import LoweringOptions
from staticllm.devices import get_core

ROOMS = ("states", "inputs", "rewrites", "shapes")
HELPERS = {"classify_mask", "fix_shapes", "fuse_adapters", "lift_cross"}
OF_CONVERSIONS = {"join_halves", "rotate_halves"}
"""They run once, when a GGUF file is converted."""


def test_every_pass_is_in_a_list_and_has_a_file(root):
    files = [path.stem for room in ROOMS for path in (root / "compiler_passes" / room).glob("[!_]*.py")]
    lists = (DECODER, PAGED, PAGED_PROOFS, PAGED_FORMS, DECODER_EMBEDDER, DECODER_NPU, ENCODER, with_adapters(DECODER))
    names = {entry.name for pipeline in lists for entry in (*pipeline.passes, *pipeline.variant_passes)}
    assert sorted(names | HELPERS | OF_CONVERSIONS) == sorted(files)


def test_a_pipeline_without_a_pass_runs_the_others_in_their_order(zoo):
    lowered = lower(get_core().read_model(zoo / "llama" / "openvino_model.xml"), LoweringOptions(256), DECODER_UNMERGED)
    names = [entry.name for entry in DECODER.passes]
    assert [report.name for report in lowered.reports] == [name for name in names if name != "merge_projections"]
    with pytest.raises(ValueError, match="no pass 'select_embeddings'"):
        DECODER.without("select_embeddings")
