"""Tests models whose RoPE factors depend on the length of a text: a token is that of the original in one call over all before it.

Such models are made of others of the zoo, and one is an export of Phi-3 with LongRoPE. Prompts and answers lie around the limits,
are cut into chunks in every way, go on with cached keys, and share calls with others.
"""

from functools import cache
from threading import Thread

import numpy as np
import pytest
from support.engine.beam_steps import advanced
from support.helpers import EXACT
from support.models.longrope import growing, make_longrope, stepped

from staticllm import StaticLLMPipeline, draft_model
from staticllm.errors import SnapshotError, StaticLLMError, UnsupportedModelError
from staticllm.pipelines.diagnostics.reference import StatefulReference
from staticllm.pipelines.generation.beam_search import BeamLimits, BeamParams, BeamSearch

LIMITS = (40, 70)
AROUND = (-9, -5, -2, -1, 0, 1, 2, 7)
SETTINGS = {
    "shared": {},
    "rows 16": {"PREFILL_ROWS": [16]},
    "rows 8 and 32": {"PREFILL_ROWS": [8, 32], "MAX_NUM_SEQS": 2, "KV_SLOTS": 240},
    "separate": {"PROGRAMS": "separate", "PREFILL_ROWS": [16], "MAX_NUM_SEQS": 2},
    "blocks": {"PROGRAMS": "blocks", "PREFILL_ROWS": [16]},
    "phases": {"PROGRAMS": "phases"},
    "few_rows": {"PROGRAMS": "few_rows"},
    "no prefixes": {"PREFIX_CACHING": False},
}
ROTARY = (
    "arcee", "cohere", "falcon", "gemma2", "gemma3_text", "glm4", "gpt_neox", "gpt_oss", "mistral", "olmo2", "phi3", "qwen2",
    "qwen2_moe", "qwen3", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
SLOW = pytest.mark.slow


class OneCall:
    """The original: logits after a text, in one call over all of it."""

    def __init__(self, path):
        self._original = StatefulReference(path)
        self.logits = cache(self._logits)

    def _logits(self, text):
        self._original.reset()
        return self._original.logits(list(text))[-1]

    def greedy(self, prompt, count):
        text = list(prompt)
        for _ in range(count):
            text.append(int(self.logits(tuple(text)).argmax()))
        return text[len(prompt) :]

    def beams(self, prompt, count, num_beams, num_sequences):
        search = BeamSearch(BeamParams(num_beams), tuple(prompt), BeamLimits(count, frozenset()))
        beams = [list(prompt)]
        while beams:
            steps = advanced(search, [self.logits(tuple(beam)) for beam in beams])
            beams = [[*beams[step.parent], step.token] for step in steps]
        return [list(found.tokens) for found in search.hypotheses()][:num_sequences]


@pytest.fixture(scope="module")
def models(zoo, tmp_path_factory):
    """A function from a name of the zoo, or ``longrope``, to a model with limits, its reference and these limits."""
    folder = tmp_path_factory.mktemp("longrope")
    exported = zoo.parent / "variants" / "phi3_longrope"

    @cache
    def model(name):
        if name == "longrope":
            return exported, OneCall(exported), (96,)
        path = make_longrope(zoo / name, folder / name, stepped(*LIMITS))
        return path, OneCall(path), LIMITS

    return model


@pytest.fixture
def open_pipe(models):
    """A function that opens a pipeline of such a model; all are closed at the end."""
    pipes = []

    def opened(name, **properties):
        path, reference, limits = models(name)
        lengths = {"MAX_PROMPT_LEN": max(limits) + 60, "MIN_RESPONSE_LEN": 24}
        pipes.append(StaticLLMPipeline(path, "CPU", **EXACT, **{**lengths, **properties}))
        return pipes[-1], reference, limits

    yield opened
    for pipe in pipes:
        pipe.close()


def tokens_of(pipe, prompt, count, **options):
    return pipe.generate(np.array(prompt), max_new_tokens=count, ignore_eos=True, **options)


def check_conversations(pipe, reference, limits, prompt_of, around=AROUND):
    """Check first and second turns around each limit, and a shorter prompt that begins like a longer one."""
    for place, length in enumerate(limit + offset for limit in limits for offset in around):
        prompt = prompt_of(length, seed=place % 3)
        first = tokens_of(pipe, prompt, 9).tokens[0]
        assert first == reference.greedy(prompt, 9), f"{length} tokens"
        second = [*prompt, *first, *prompt_of(5, seed=9)]
        assert tokens_of(pipe, second, 5).tokens[0] == reference.greedy(second, 5), f"{length} tokens, second turn"
        shorter = prompt[: length - 11]
        assert tokens_of(pipe, shorter, 3).tokens[0] == reference.greedy(shorter, 3), (
            f"{length - 11} tokens, after more"
        )


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("llama", "shared"),
        ("llama", "blocks"),
        *(pytest.param("longrope", setting, marks=SLOW) for setting in SETTINGS),
        *(pytest.param("llama", setting, marks=SLOW) for setting in SETTINGS if setting not in ("shared", "blocks")),
        *(pytest.param(name, "rows 16", marks=SLOW) for name in ROTARY),
        *(pytest.param(name, "blocks", marks=SLOW) for name in ("gemma3_text", "gpt_oss", "phi3")),
    ],
)
def test_tokens_are_those_of_one_call(name, setting, open_pipe, prompt_of, in_full):
    pipe, reference, limits = open_pipe(name, **SETTINGS[setting])
    check_conversations(pipe, reference, limits, prompt_of, AROUND if in_full else (-5, 0, 2))


@pytest.mark.parametrize(
    "setting", ["shared", *(pytest.param(each, marks=SLOW) for each in ("blocks", "rows 8 and 32"))]
)
def test_short_and_long_texts_share_calls(setting, open_pipe, prompt_of):
    pipe, reference, _ = open_pipe("llama", **SETTINGS[setting])
    lengths = (20, 33, 38, 40, 41, 66, 70, 90)
    prompts = [prompt_of(length, seed=seed) for seed, length in enumerate(lengths)]
    handles = [pipe.submit(np.array(prompt), max_new_tokens=9, ignore_eos=True) for prompt in prompts]
    for prompt, handle in zip(prompts, handles, strict=True):
        assert handle.result().tokens[0] == reference.greedy(prompt, 9)


def test_an_answer_that_crosses_a_limit_says_how_much_ran_again(open_pipe, prompt_of):
    pipe, _, _ = open_pipe("llama")
    counts = [tokens_of(pipe, prompt_of(n), 9).perf_metrics.get_num_recomputed_tokens() for n in (20, 36, 40, 41, 66)]
    assert counts == [0, 40, 40, 0, 70]


def test_several_answers_and_beams_cross_a_limit(open_pipe, prompt_of):
    pipe, reference, _ = open_pipe("llama")
    for length in (36, 40):
        prompt = prompt_of(length)
        found = tokens_of(pipe, prompt, 8, do_sample=True, temperature=1e-4, num_return_sequences=3)
        assert found.tokens == [reference.greedy(prompt, 8)] * 3
        beams = tokens_of(pipe, prompt, 8, num_beams=3, num_return_sequences=2)
        assert beams.tokens == reference.beams(prompt, 8, 3, 2)
        assert beams.perf_metrics.get_num_recomputed_tokens()


def test_drafts_stop_at_a_limit(open_pipe, models, prompt_of):
    """The draft model is the same model, so that all of its tokens are accepted but those that would cross a limit."""
    path, reference, _ = models("llama")
    pipe, *_ = open_pipe("llama", draft_model=draft_model(path, "CPU"))
    for length in (30, 39, 40, 41, 65):
        prompt = prompt_of(length)
        found = tokens_of(pipe, prompt, 16, num_assistant_tokens=4)
        assert found.tokens[0] == reference.greedy(prompt, 16), length
        assert tokens_of(pipe, [*prompt, *prompt[:9]], 12, max_ngram_size=3).tokens[0] == reference.greedy(
            [*prompt, *prompt[:9]], 12
        )


def test_conversations_of_the_host_pool_keep_their_factors(open_pipe, prompt_of):
    pipe, reference, _ = open_pipe("llama", MAX_NUM_SEQS=1, KV_SLOTS=160)
    texts = [prompt_of(34, seed=1), prompt_of(60, seed=2), prompt_of(30, seed=3)]
    for _ in range(4):
        for place, text in enumerate(texts):
            answer = tokens_of(pipe, text, 6).tokens[0]
            assert answer == reference.greedy(text, 6), (place, len(text))
            texts[place] = [*text, *answer, 5 + place]


def test_a_snapshot_serves_texts_with_its_factors_only(open_pipe, models, prompt_of, tmp_path):
    pipe, reference, _ = open_pipe("llama")
    for length in (30, 50):
        prompt = prompt_of(length)
        tokens_of(pipe, prompt, 3)
        pipe.save_snapshot(tmp_path / str(length), np.array(prompt))
    other, *_ = open_pipe("llama")
    for length, longer, is_reused in ((30, 36, True), (30, 60, False), (50, 60, True), (50, 80, False)):
        other.load_snapshot(tmp_path / str(length))
        text = [*prompt_of(length), *prompt_of(longer - length, seed=4)]
        found = tokens_of(other, text, 4)
        assert found.tokens[0] == reference.greedy(text, 4)
        assert (found.perf_metrics.get_num_cached_tokens() >= length - 1) is is_reused
    with pytest.raises(SnapshotError):
        open_pipe("longrope")[0].load_snapshot(tmp_path / "50")


@pytest.mark.parametrize("overflow", ["shift", "truncate_middle", "context_shift"])
def test_a_shortened_conversation_has_the_factors_of_its_length(overflow, open_pipe, prompt_of):
    """Its 60 tokens become 30 of other factors, again and again."""
    pipe, reference, _ = open_pipe("llama", MAX_PROMPT_LEN=50, MIN_RESPONSE_LEN=10)
    prompt = prompt_of(45)
    found = tokens_of(pipe, prompt, 40, overflow=overflow).tokens[0]
    text, expected = list(prompt), []
    while len(expected) < 40:
        expected += reference.greedy(text, 1)
        text.append(expected[-1])
        if len(text) > 60:
            head = 7 if overflow == "truncate_middle" else 4
            text = [*text[:head], *text[len(text) - (30 - head) :]]
    assert found == expected


def test_compiled_programs_are_kept_with_their_limits(open_pipe, prompt_of, tmp_path):
    answers = []
    for _ in range(2):
        pipe, reference, _ = open_pipe("llama", CACHE_DIR=str(tmp_path))
        answers.append(tokens_of(pipe, prompt_of(38), 6).tokens[0])
    assert pipe.engine.runner.cache.rope_limits == LIMITS
    assert answers == [reference.greedy(prompt_of(38), 6)] * 2


def test_more_limits_than_sets_are_kept_for_are_named(zoo, tmp_path):
    path = make_longrope(zoo / "llama", tmp_path / "many", stepped(24, 32, 40, 48, 56))
    with pytest.raises(
        UnsupportedModelError, match=r"change more often than 3 times \(after 24, 32, 40, 48 tokens and"
    ):
        StaticLLMPipeline(path, "CPU", **EXACT, MAX_PROMPT_LEN=60, MIN_RESPONSE_LEN=20)


def test_factors_of_every_length_are_refused_beyond_the_first_limit(zoo, tmp_path, prompt_of):
    path = make_longrope(zoo / "llama", tmp_path / "growing", growing(64))
    with pytest.raises(
        UnsupportedModelError, match="above 64 tokens the RoPE factors change with every token"
    ) as refused:
        StaticLLMPipeline(path, "CPU", **EXACT, MAX_PROMPT_LEN=60, MIN_RESPONSE_LEN=20)
    assert "\n" not in str(refused.value)
    assert "MAX_PROMPT_LEN + MIN_RESPONSE_LEN of at most 64 (here 80)" in str(refused.value)
    with StaticLLMPipeline(path, "CPU", **EXACT, MAX_PROMPT_LEN=48, MIN_RESPONSE_LEN=16, PREFILL_ROWS=[16]) as pipe:
        assert tokens_of(pipe, prompt_of(40), 20).tokens[0] == OneCall(path).greedy(prompt_of(40), 20)


def test_a_model_that_never_reaches_its_limit_needs_no_factors(open_pipe, prompt_of):
    pipe, reference, _ = open_pipe("llama", MAX_PROMPT_LEN=24, MIN_RESPONSE_LEN=16, PREFILL_ROWS=[16])
    assert pipe.engine.runner.cache.rope_limits == ()
    assert tokens_of(pipe, prompt_of(24), 16).tokens[0] == reference.greedy(prompt_of(24), 16)


@SLOW
def test_sine_and_cosine_may_be_scaled_by_the_length(zoo, tmp_path, prompt_of):
    """As in Phi-3.5-MoE, which has a factor of its own for long texts."""
    from openvino import opset13 as ops

    def scale(length):
        return ops.select(ops.greater(length, np.float32(40)), np.float32(1.3), np.float32(1.1))

    path = make_longrope(zoo / "qwen3", tmp_path / "scaled", stepped(40), scale)
    with StaticLLMPipeline(path, "CPU", **EXACT, MAX_PROMPT_LEN=90, MIN_RESPONSE_LEN=30, PREFILL_ROWS=[16]) as pipe:
        check_conversations(pipe, OneCall(path), (40,), prompt_of)


@SLOW
def test_many_threads_cross_limits(open_pipe, prompt_of):
    pipe, reference, _ = open_pipe("llama", MAX_NUM_SEQS=4, KV_SLOTS=320)
    prompts = [prompt_of(28 + 2 * seed, seed=seed) for seed in range(24)]
    expected = [reference.greedy(prompt, 16) for prompt in prompts]
    found = {}

    def run(place):
        try:
            found[place] = tokens_of(pipe, prompts[place], 16).tokens[0]
        except StaticLLMError as error:
            found[place] = error

    threads = [Thread(target=run, args=(place,)) for place in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[place] for place in range(len(prompts))] == expected
