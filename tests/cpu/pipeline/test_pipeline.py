"""Tests ``StaticLLMPipeline`` as a desktop application uses it."""

from __future__ import annotations

import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest
from support.helpers import EXACT

from staticllm import DecodedResults, EncodedResults, GeneratedText, StaticLLMConfig, StaticLLMPipeline

pytestmark = pytest.mark.usefixtures("shared_programs")

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def pipe(zoo):
    return StaticLLMPipeline(zoo / "llama", "CPU", MAX_PROMPT_LEN=256, **EXACT)


@pytest.fixture
def greedy(zoo, original):
    return original(zoo / "llama").greedy(PROMPT, 40)


def tokens(pipe, **options):
    return pipe.generate(np.array(PROMPT), **options).tokens[0]


def test_every_form_of_input_gives_the_same_answer(pipe):
    tokenizer, history = pipe.get_tokenizer(), genai.ChatHistory()
    history.append({"role": "user", "content": "hello"})
    text = tokenizer.apply_chat_template(history, add_generation_prompt=True)
    tokenized = tokenizer.encode(text, add_special_tokens=False)
    ids = tokenized.input_ids.data
    forms = {
        GeneratedText: ["hello"],
        DecodedResults: [["hello"], history],
        EncodedResults: [ids, ids[0], ids.astype(np.int32), ov.Tensor(ids), tokenized],
    }
    answers = set()
    for kind, inputs in forms.items():
        for item in inputs:
            result = pipe.generate(item, max_new_tokens=8, ignore_eos=True)
            assert type(result) is kind
            assert result.perf_metrics.get_num_input_tokens() == ids.size
            answers.add(tuple(result.tokens[0]))
    assert len(answers) == 1
    assert pipe.generate("hello", max_new_tokens=8, ignore_eos=True) == tokenizer.decode(list(answers.pop()))


def test_padding_of_tokenized_inputs_is_left_out(pipe):
    padded = genai.TokenizedInputs(ov.Tensor(np.array([[2, 2, *PROMPT]])), ov.Tensor(np.array([[0, 0, 1, 1, 1]])))
    assert pipe.generate(padded, max_new_tokens=5).tokens[0] == tokens(pipe, max_new_tokens=5)


def test_arguments_are_accepted_in_genais_orders(zoo):
    path, tokenizer = zoo / "llama", genai.Tokenizer(zoo / "llama")
    small = {"MAX_PROMPT_LEN": 32, "MIN_RESPONSE_LEN": 16}
    pipes = [
        StaticLLMPipeline(path, "CPU", small),
        StaticLLMPipeline(str(path), tokenizer, "CPU", small),
        StaticLLMPipeline(path, tokenizer, "CPU", **small),
        StaticLLMPipeline(path, tokenizer, device="CPU", **small),
        StaticLLMPipeline(path, None, "CPU", small),
        StaticLLMPipeline(str(path).encode(), device="CPU", config=small),
        StaticLLMPipeline(path, config=StaticLLMConfig(max_prompt_len=32, min_response_len=16), tokenizer=tokenizer),
    ]
    assert {pipe.config.max_seq_len for pipe in pipes} == {48}
    assert len({tuple(tokens(pipe, max_new_tokens=4)) for pipe in pipes}) == 1


def test_a_given_tokenizer_needs_no_files(zoo, tmp_path, greedy):
    for name in ("openvino_model.xml", "openvino_model.bin"):
        (tmp_path / name).write_bytes((zoo / "llama" / name).read_bytes())
    pipe = StaticLLMPipeline(tmp_path, tokenizer=genai.Tokenizer(zoo / "llama"), MAX_PROMPT_LEN=32, **EXACT)
    assert tokens(pipe, max_new_tokens=5) == greedy[:5]


def test_a_pipeline_can_be_called(pipe, greedy):
    assert pipe(np.array(PROMPT), max_new_tokens=3).tokens[0] == greedy[:3]


def test_properties_can_be_set_per_phase(zoo, greedy):
    """GenAI's users write such properties for NPUW. Those of NPUW cause a warning, and the rest go to the device."""
    phases = {"PREFILL_CONFIG": {"NPUW_DEVICES": "CPU", "NUM_STREAMS": 1}, "GENERATE_CONFIG": {"NUM_STREAMS": 1}}
    with pytest.warns(UserWarning, match="NPUW_DEVICES"):
        pipe = StaticLLMPipeline(zoo / "llama", "CPU", MAX_PROMPT_LEN=32, **phases, **EXACT)
    assert tokens(pipe, max_new_tokens=5) == greedy[:5]
    differing = {"PREFILL_CONFIG": {"NUM_STREAMS": 1}, "GENERATE_CONFIG": {"INFERENCE_NUM_THREADS": 1}}
    pipe = StaticLLMPipeline(zoo / "llama", "CPU", MAX_PROMPT_LEN=32, **differing, **EXACT)
    assert len({id(program.compiled) for program in pipe.engine.runner.programs.values()}) == 2
    assert tokens(pipe, max_new_tokens=5) == greedy[:5]


def test_lengths_are_limited_and_reasons_reported(pipe, greedy):
    for count in (1, 2, 40):
        result = pipe.generate(np.array(PROMPT), max_new_tokens=count)
        assert result.tokens[0] == greedy[:count]
        assert result.finish_reasons == ["length"]
    assert tokens(pipe, max_length=len(PROMPT) + 4) == greedy[:4]
    stopped = pipe.generate(np.array(PROMPT), max_new_tokens=40, stop_token_ids={greedy[3]})
    assert stopped.tokens[0] == greedy[:4]
    assert stopped.finish_reasons == ["stop"]
    assert tokens(pipe, max_new_tokens=6, stop_token_ids={greedy[3]}, ignore_eos=True) == greedy[:6]
    forced = tokens(pipe, max_new_tokens=40, min_new_tokens=8, stop_token_ids={greedy[3]})
    assert greedy[3] not in forced[:8]
    assert forced[:3] == greedy[:3]
    assert tokens(pipe, max_new_tokens=0, echo=True) == PROMPT
    assert tokens(pipe, max_new_tokens=2, echo=True) == PROMPT + greedy[:2]


def test_stop_strings_cut_text_and_stream(pipe):
    options = {"max_new_tokens": 12, "apply_chat_template": False, "ignore_eos": True}
    whole = pipe.generate("hello world", **options)
    stop = whole[5:8]
    pieces = []
    result = pipe.generate(["hello world"], streamer=pieces.append, stop_strings={stop}, **options)
    assert result.texts == [whole[: whole.index(stop)]] == ["".join(pieces)]
    assert result.finish_reasons == ["stop"]
    included = pipe.generate("hello world", stop_strings=stop, include_stop_str_in_output=True, **options)
    assert included == whole[: whole.index(stop) + len(stop)]
    received = []

    class Streamer(genai.StreamerBase):
        def write(self, token):
            received.append(token)
            return genai.StreamingStatus.RUNNING

        def end(self):
            received.append("end")

    result = pipe.generate(["hello world"], streamer=Streamer(), stop_strings={stop}, **options)
    assert received == [*([token] for token in result.tokens[0]), "end"]
    assert len(result.tokens[0]) < 12


def test_streamed_text_equals_the_result(pipe):
    pieces = []
    text = pipe.generate("hello", streamer=pieces.append, max_new_tokens=60, ignore_eos=True)
    assert "".join(pieces) == text == text.texts[0]
    assert len(pieces) > 5
    assert text == pipe.get_tokenizer().decode(text.tokens[0])


def test_genais_own_text_streamer_works(pipe):
    pieces = []
    streamer = genai.TextStreamer(pipe.get_tokenizer(), pieces.append)
    text = pipe.generate("hello", streamer=streamer, max_new_tokens=30, ignore_eos=True)
    assert "".join(pieces) == text


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (True, "stop"),
        (1, "stop"),
        (genai.StreamingStatus.STOP, "stop"),
        (genai.StreamingStatus.CANCEL, "cancelled"),
        (genai.StreamingStatus.TOOL_CALL_STOP, "tool_call"),
    ],
    ids=["true", "one", "stop", "cancel", "tool_call"],
)
def test_a_streamer_can_stop_the_answer(pipe, status, reason):
    pieces = []

    def streamer(piece):
        pieces.append(piece)
        return status if len(pieces) == 3 else None

    result = pipe.generate(["hello"], streamer=streamer, max_new_tokens=100, ignore_eos=True)
    assert result.finish_reasons == [reason]
    assert len(pieces) == 3
    assert result.texts[0].startswith("".join(pieces))


def test_genai_configs_are_accepted_and_not_changed(pipe, greedy):
    config = genai.GenerationConfig()
    config.max_new_tokens = 5
    config.ignore_eos = True
    assert tokens(pipe, generation_config=config) == greedy[:5]
    assert tokens(pipe, generation_config=config, max_new_tokens=7) == greedy[:7]
    assert config.max_new_tokens == 5
    assert tokens(pipe, generation_config={"max_new_tokens": 3}) == greedy[:3]
    before = pipe.get_generation_config()
    pipe.set_generation_config(config)
    assert tokens(pipe) == greedy[:5]
    assert pipe.get_generation_config().eos_token_id == 1
    config.max_new_tokens = 9
    assert tokens(pipe) == greedy[:5], "the pipeline keeps a copy"
    pipe.set_generation_config(before)


def test_sampling_repeats_with_a_seed_and_varies_without(pipe):
    options = {"max_new_tokens": 20, "do_sample": True, "temperature": 1.5, "ignore_eos": True}
    assert tokens(pipe, rng_seed=7, **options) == tokens(pipe, rng_seed=7, **options)
    assert tokens(pipe, rng_seed=7, **options) != tokens(pipe, rng_seed=8, **options)
    assert tokens(pipe, **options) != tokens(pipe, **options)
    assert tokens(pipe, top_k=1, **options) == tokens(pipe, max_new_tokens=20, ignore_eos=True)


def test_scores_are_sums_of_log_probabilities(pipe, zoo, greedy, original):
    reference = original(zoo / "llama")
    logits = reference.logits(PROMPT + greedy[:7])[len(PROMPT) - 1 :].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = sum(logprobs[i, token] for i, token in enumerate(greedy[:8]))
    result = pipe.generate(np.array(PROMPT), max_new_tokens=8, logprobs=1)
    assert result.scores == [pytest.approx(expected, abs=1e-3)]
    assert pipe.generate(np.array(PROMPT), max_new_tokens=8).scores == [0.0]


def test_a_chat_prefills_only_its_new_tokens(pipe):
    pipe.start_chat("You are terse.")
    first = pipe.generate("hello", max_new_tokens=8)
    second = pipe.generate("and again", max_new_tokens=8)
    pipe.finish_chat()
    history = genai.ChatHistory(
        [
            {"role": "system", "content": "You are terse."},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": str(first)},
            {"role": "user", "content": "and again"},
        ]
    )
    assert pipe.generate(history, max_new_tokens=8).texts == [second]
    metrics = second.perf_metrics
    assert first.perf_metrics.get_num_input_tokens() <= metrics.get_num_cached_tokens() < metrics.get_num_input_tokens()


def test_a_list_of_one_prompt_is_a_turn_and_echo_returns_the_prompt(pipe):
    pipe.start_chat()
    first = pipe.generate(["hello"], max_new_tokens=6)
    second = pipe.generate(["hello"], max_new_tokens=6, echo=True)
    third = pipe.generate("hello", max_new_tokens=6)
    pipe.finish_chat()
    counts = [result.perf_metrics.get_num_input_tokens() for result in (first, second, third)]
    assert counts[0] < counts[1] < counts[2]
    assert isinstance(second, DecodedResults)
    assert second.texts[0].startswith("user\nhello\nassistant")


def test_no_slot_moves_between_prefill_and_decode(zoo, prompt_of, monkeypatch):
    """The stride does not change from the last chunk to the first decode step, at any length and with any prefix."""
    from staticllm.kvcache import arena

    moved = []
    restride = arena.restride
    monkeypatch.setattr(arena, "restride", lambda *arguments: moved.append(1) or restride(*arguments))
    pipe = StaticLLMPipeline(zoo / "llama", "CPU", MAX_PROMPT_LEN=256, **EXACT)  # its programs go with it
    runner = pipe.engine.runner
    for length in (1, 9, 100, 250, 256):
        sequence = runner.reset()
        logits = runner.prefill(sequence, prompt_of(length))
        moved.clear()
        if length < 256:  # at 256 the KV length has no room for a new token
            runner.decode(sequence, int(logits.argmax()))
        assert not moved
    sequence = runner.reset()
    runner.prefill(sequence, prompt_of(20))
    runner.prefill(sequence, prompt_of(40, seed=3))
    runner.decode(sequence, 7)
    assert not moved, "a second turn that fits the same KV length"


def test_a_chat_forgets_a_cancelled_turn_but_keeps_a_stopped_one(pipe):
    """The length of the next prompt tells: it is that of a new chat if the turn was forgotten, and longer otherwise."""

    def second_prompt(status):
        pipe.start_chat()
        pipe.generate("hello", streamer=lambda piece: status, max_new_tokens=30, ignore_eos=True)
        length = pipe.generate("hello", max_new_tokens=1).perf_metrics.get_num_input_tokens()
        pipe.finish_chat()
        return length

    pipe.start_chat()
    fresh = pipe.generate("hello", max_new_tokens=1).perf_metrics.get_num_input_tokens()
    pipe.finish_chat()
    assert second_prompt(genai.StreamingStatus.CANCEL) == fresh < second_prompt(genai.StreamingStatus.STOP)


def test_metrics_count_tokens_and_times(pipe):
    result = pipe.generate(np.array([9, *PROMPT]), max_new_tokens=12, ignore_eos=True)
    metrics = result.perf_metrics
    assert (metrics.get_num_input_tokens(), metrics.get_num_generated_tokens()) == (4, 12)
    assert 0 < metrics.get_tpot().mean < metrics.get_generate_duration().mean
    assert 0 < metrics.get_ipot().mean <= metrics.get_tpot().mean
    assert 0 < metrics.get_ttft().mean <= metrics.get_generate_duration().mean
    assert metrics.get_throughput().mean == pytest.approx(1e3 / metrics.get_tpot().mean)
    assert 0 < metrics.get_inference_duration().mean <= metrics.get_generate_duration().mean
    assert metrics.get_load_time() > 10
    assert 0 < metrics.get_sampling_duration().mean < metrics.get_tpot().mean
    raw = metrics.raw_metrics
    assert (len(raw.m_new_token_times), len(raw.m_durations), len(raw.token_infer_durations)) == (12, 11, 11)


def test_progress_is_reported_for_every_variant(zoo):
    events = []
    lengths = {"MAX_PROMPT_LEN": 64, "MIN_RESPONSE_LEN": 32}
    pipe = StaticLLMPipeline(zoo / "llama", "CPU", on_progress=events.append, **lengths, PROGRAMS="separate")
    variants = list(pipe.engine.runner.programs)
    assert [event.stage for event in events[:2]] == ["read", "passes"]
    for stage in ("compile", "warm-up"):
        mine = [event for event in events if event.stage == stage and event.is_done]
        assert [event.variant for event in mine] == variants
        assert [event.index for event in mine] == list(range(1, len(variants) + 1))
        assert all(event.total == len(variants) and event.seconds > 0 for event in mine)
    announced = [event.variant for event in events if not event.is_done and not event.seconds]
    fractions = [event.fraction for event in events]
    assert fractions == sorted(fractions) and fractions[-1] == 1 and events[-1].stage == "ready"
    assert announced == variants, "a compilation is announced before its minutes begin"
