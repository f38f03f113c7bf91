"""Replays the walkthrough of the article on NPUW (docs/lab/npuw.md) with static programs, and says where they differ.

Every step's inputs are recorded as the programs see them. Tokens are compared with those of the original model in f32.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from support.helpers import EXACT

from staticllm import StaticLLMPipeline
from staticllm.core import Variant
from staticllm.kvcache.cache import PAD_TOKEN, KVCache
from staticllm.pipelines.scheduling.interface import Plan
from staticllm.pipelines.scheduling.plans import decode_plan

pytestmark = pytest.mark.usefixtures("shared_programs")

MAX_PROMPT_LEN, MIN_RESPONSE_LEN = 1024, 128
CAPACITY = MAX_PROMPT_LEN + MIN_RESPONSE_LEN
HELLO = [842]  # one token, as "Hello" is in the article
WHAT_IS_NPU = [842, 17, 305, 611]  # four, as its first example has


@dataclass(frozen=True)
class Call:
    """The inputs of one call: ids and positions of its rows, the sees of its mask ``[rows, columns]``, and slots in use after."""

    variant: Variant
    ids: tuple[int, ...]
    positions: tuple[int, ...]
    visible: np.ndarray
    num_slots: int


@pytest.fixture
def calls(monkeypatch):
    """The calls of all pipelines, in their order."""
    found = []
    filled = {}
    fill, commit = KVCache.fill, KVCache.commit

    def recorded_fill(self, step, buffers):
        fill(self, step, buffers)
        (mask,) = buffers.masks.values()
        filled[id(self)] = (
            step.variant, tuple(buffers.input_ids[0].tolist()), tuple(buffers.position_ids.reshape(-1).tolist()),
            mask[0, 0] == 0,
        )  # fmt: skip

    def recorded_commit(self, step, buffers, accepted=None):
        result = commit(self, step, buffers, accepted)
        found.append(Call(*filled[id(self)], self.slots.num_used))
        return result

    monkeypatch.setattr(KVCache, "fill", recorded_fill)
    monkeypatch.setattr(KVCache, "commit", recorded_commit)
    return found


@pytest.fixture
def pipeline(model_path, calls):
    """A function from sizes to a pipeline of one sequence, without calls of its warm-up."""

    def load(generate_kv_lens, max_prompt_len=MAX_PROMPT_LEN, **properties):
        pipe = StaticLLMPipeline(
            model_path("llama"), "CPU", PROGRAMS="separate", MAX_NUM_SEQS=1, MAX_PROMPT_LEN=max_prompt_len,
            MIN_RESPONSE_LEN=MIN_RESPONSE_LEN, GENERATE_KV_LENS=list(generate_kv_lens), **EXACT, **properties,
        )  # fmt: skip
        calls.clear()
        return pipe

    return load


class WholePrompts:
    """Runs each prompt in one call, as NPUW does; the shipped policies compare the costs of several."""

    def plan(self, view):
        if view.waiting:
            return Plan(prefill=((view.waiting[0].id, view.waiting[0].num_left),))
        return decode_plan(view)


def greedy(pipe, prompt, count):
    (tokens,) = pipe.generate(np.array([prompt]), max_new_tokens=count, ignore_eos=True).tokens
    return tokens


@pytest.fixture
def hello(pipeline):
    return pipeline([256, CAPACITY], PREFILL_ROWS=[MAX_PROMPT_LEN], PREFILL_KV_LENS=[0])


def test_step_1_compiles_one_prefill_and_two_generate_programs(hello):
    assert sorted(hello.engine.runner.programs) == [
        Variant(1, 256),
        Variant(1, CAPACITY),
        Variant(MAX_PROMPT_LEN, 0),
    ]
    for program in hello.engine.runner.programs.values():
        assert all(port.partial_shape.is_static for port in (*program.compiled.inputs, *program.compiled.outputs))


def test_steps_2_to_5_from_the_prompt_to_the_loop(pipeline, calls, model_path, original):
    pipe = pipeline([256, CAPACITY], PREFILL_ROWS=[MAX_PROMPT_LEN], PREFILL_KV_LENS=[0], scheduler=WholePrompts())
    arena = pipe.engine.runner.cache.arena
    addresses = list(arena.addresses)
    num = len(WHAT_IS_NPU)
    answer = greedy(pipe, WHAT_IS_NPU, 100)
    assert answer == original(model_path("llama")).greedy(WHAT_IS_NPU, 100)
    prefill, *loop = calls
    assert prefill.variant == Variant(MAX_PROMPT_LEN, 0)
    assert prefill.ids[:num] == tuple(WHAT_IS_NPU)
    assert set(prefill.ids[num:]) == {PAD_TOKEN}, "left-aligned: padding behind the tokens"
    assert prefill.positions[:num] == (0, 1, 2, 3)
    assert prefill.visible[num - 1].tolist() == [True] * num + [False] * (MAX_PROMPT_LEN - num)
    assert prefill.num_slots == num, "of 1024 new rows, four are copied"
    assert len(loop) == 99
    for number, call in enumerate(loop, 1):
        assert call.variant == Variant(1, 256), "the smallest one that is enough"
        assert call.ids == (answer[number - 1],)
        assert call.positions == (num + number - 1,)
        assert int(call.visible.sum()) == num + number, "one more in each round"
        assert call.num_slots == num + number, "one new row is written"
    assert loop[-1].num_slots == 103, "valid slots when the 100th token is generated"
    assert list(arena.addresses) == addresses, "ports are bound once: no command list needs other addresses"


def test_a_prompt_of_one_token_runs_in_a_generate_program(hello, calls, model_path, original):
    """The article runs it in 1024 rows, of which 1023 are padding."""
    answer = greedy(hello, HELLO, 6)
    assert answer == original(model_path("llama")).greedy(HELLO, 6)
    assert [call.variant for call in calls] == [Variant(1, 256)] * 6
    assert [int(call.visible.sum()) for call in calls] == [1, 2, 3, 4, 5, 6], "2 ones in round 1, 3 in round 2"


def test_step_6_goes_on_where_the_article_ends(hello, calls, model_path, original):
    """The article ends at the capacity of the chosen variant, 256. Here the next larger one takes over, over the same slots."""
    count = 300
    assert greedy(hello, HELLO, count) == original(model_path("llama")).greedy(HELLO, count)
    kv_lens = [call.variant.kv_len for call in calls]
    assert kv_lens == sorted(kv_lens)
    assert 256 <= kv_lens.count(256) <= 257, "until 256 slots are in use"
    assert set(kv_lens) == {256, CAPACITY}


@pytest.mark.parametrize(("num_prompt", "of_npuw", "here"), [(20, 256, 256), (300, 512, 512), (400, 1024, 512)])
def test_variants_are_chosen_by_slots_in_use_without_a_reserve(pipeline, calls, prompt_of, num_prompt, of_npuw, here):
    sizes = [256, 512, 1024, CAPACITY]
    assert of_npuw == next(size for size in sizes if size >= num_prompt + MIN_RESPONSE_LEN)
    greedy(pipeline(sizes), prompt_of(num_prompt), 3)
    assert [call.variant.kv_len for call in calls if call.variant.rows == 1] == [here, here]


def test_long_prompts_run_in_chunks_that_read_those_before(pipeline, calls, prompt_of, model_path, original):
    """As prompts above 1024 tokens, with chunks of 64. No copy follows: the slots that chunks write are those of the loop."""
    pipe = pipeline([256, 320], 192, PREFILL_ROWS=[64])
    prompt = prompt_of(150)
    assert greedy(pipe, prompt, 8) == original(model_path("llama")).greedy(prompt, 8)
    chunks = [call for call in calls if call.variant.rows == 64]
    assert [call.num_slots for call in chunks] == [64, 128, 150]
    assert [bool(call.variant.kv_len) for call in chunks] == [False, True, True]
    assert [int(call.visible[0].sum()) for call in chunks] == [1, 65, 129]
    assert chunks[-1].ids[:22] == tuple(prompt[128:])
    assert len(set(chunks[-1].ids[22:])) == 1, "padding behind the tokens"


def test_a_new_conversation_needs_no_zeros(hello, model_path, original):
    """The article clears all KV slots. Masks hide what is in them here, so numbers of old conversations may stay."""
    arena = hello.engine.runner.cache.arena
    greedy(hello, HELLO, 40)
    for memory in arena.blocks:
        memory.fill(7)
    other = [901]
    assert greedy(hello, other, 12) == original(model_path("llama")).greedy(other, 12)
