"""Tests that samplers and processors with a state give every answer its own tokens, whatever the engine does with its slots."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.engine_schedules import Disturbed
from support.engine.output_queues import outputs_of
from support.quick import examples

from staticllm.pipelines.engine.request import EngineRequest, TokenOutput
from staticllm.pipelines.engine.state import RequestState
from staticllm.pipelines.generation.drafts import DraftParams
from staticllm.pipelines.generation.logits_processors import copies_for
from staticllm.pipelines.generation.options.table import SamplingParams
from staticllm.pipelines.scheduling.planner import POLICIES, make_policy
from staticllm.testing import VOCAB_SIZE, assert_empty, fake_engine, run_to_end


class Turns:
    """Allows a third of the tokens at a time, in turn."""

    def __init__(self):
        self.turn = 0

    def process(self, logits):
        allowed = logits[self.turn :: 3].copy()
        logits[:] = -1e9
        logits[self.turn :: 3] = allowed

    def accept(self, token):
        assert token % 3 == self.turn
        self.turn = (self.turn + 1) % 3


def few(input_ids, scores):
    """Prefer a few tokens that depend on all tokens so far, so that repetitions occur."""
    scores[int(input_ids.sum()) % 5 :: 331] += 6.0


SAMPLERS = (
    (SamplingParams(), (Turns(),)),
    (SamplingParams(no_repeat_ngram_size=2), (few,)),
    (SamplingParams(dry_multiplier=8.0, dry_allowed_length=1, dry_breakers=((3,), (331, 662))), (few,)),
    (SamplingParams(do_sample=True, mirostat=2, mirostat_tau=2.0, mirostat_eta=0.4), (few, Turns())),
    (SamplingParams(do_sample=True, xtc_probability=0.5, xtc_threshold=0.05, temperature=0.7), (few,)),
    (SamplingParams(do_sample=True, typical_p=0.5, bad_words=((1,), (331, 2)), logit_bias=((7, 4.0),)), (few,)),
)


def new_request(index, length, num_new, kind, count, has_drafts):
    sampling, processors = SAMPLERS[kind]
    prompt = tuple(range(9 * index, 9 * index + length))
    request = EngineRequest(
        prompt, sampling, seed=100 * index, num_sequences=count, max_new_tokens=num_new,
        drafts=DraftParams(max_ngram_size=2, max_tokens=3) if has_drafts else None,
    )  # fmt: skip
    return RequestState(request, VOCAB_SIZE, user_processors=copies_for(processors, prompt, count))


def answers_of(state):
    found = [[] for _ in range(state.request.num_sequences)]
    for output in outputs_of(state):
        if isinstance(output, TokenOutput):
            found[output.index].append(output.id)
        else:
            assert output.error is None, output.error
    return found


@settings(deadline=None, max_examples=examples(150))
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(0, len(SAMPLERS) - 1), st.integers(1, 3), st.booleans()),
        min_size=1, max_size=5,
    ),
    host_kv_slots=st.sampled_from([0, 40, 256]),
    moves=st.lists(st.sampled_from([None, "swap_out", "preempt", "skip"]), max_size=30),
    policy=st.sampled_from(sorted(POLICIES)),
)  # fmt: skip
def test_any_schedule_gives_every_answer_the_tokens_that_it_gets_alone(requests, host_kv_slots, moves, policy):
    engine = fake_engine(Disturbed(policy, moves), 3, host_kv_slots=host_kv_slots)
    together = [
        new_request(index, *asked, has_drafts=has_drafts and asked[-1] == 1)
        for index, (*asked, has_drafts) in enumerate(requests)
    ]
    run_to_end(engine, together)
    assert_empty(engine)
    for index, (*asked, _) in enumerate(requests):
        alone = new_request(index, *asked, has_drafts=False)
        run_to_end(fake_engine(make_policy("fcfs")), [alone])
        expected = answers_of(alone)
        assert [len(tokens) for tokens in expected] == [asked[1]] * asked[3]
        assert answers_of(together[index]) == expected
