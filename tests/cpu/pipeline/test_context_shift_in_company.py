"""Tests that a conversation whose keys are moved takes no slots from other requests."""

from __future__ import annotations

import numpy as np
import pytest
from support.helpers import EXACT

from staticllm import StaticLLMPipeline

pytestmark = pytest.mark.usefixtures("shared_programs")

SMALL = {"MAX_PROMPT_LEN": 96, "MIN_RESPONSE_LEN": 4, "MAX_NUM_SEQS": 4, **EXACT}


@pytest.mark.parametrize("slots", [128, 160, 200])
def test_answers_that_share_a_prompt_shift_with_few_slots(slots, zoo, prompt_of):
    """Slots that are shared are not freed by a shift, so the moved keys need others."""
    with StaticLLMPipeline(zoo / "llama", "CPU", **SMALL, KV_SLOTS=slots) as pipe:
        other = pipe.submit(np.array(prompt_of(30)), max_new_tokens=60, ignore_eos=True)
        results = pipe.generate(
            np.array(prompt_of(90)),
            max_new_tokens=60,
            ignore_eos=True,
            overflow="context_shift",
            num_return_sequences=3,
            do_sample=True,
        )
        assert [len(tokens) for tokens in results.tokens] == [60] * 3
        assert len(other.result().tokens[0]) == 60
