"""Cross-attention in step programs: its keys and values are computed once per window; rows of several windows share a call."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from staticllm.compiler_passes.lower import lower
from staticllm.compiler_passes.lower_alignment import lower_alignment
from staticllm.compiler_passes.lower_cross_window import lower_cross_window
from staticllm.compiler_passes.pass_pipeline import LoweringOptions
from staticllm.core import CrossWindowVariant, Variant
from staticllm.devices import get_core
from staticllm.errors import UnsupportedModelError
from staticllm.kvcache.cache import KVCache
from staticllm.kvcache.sequence import Conditions
from staticllm.kvcache.step import BufferPool, Segment, StepBuffers
from staticllm.pipelines.programs.bind import bind
from staticllm.pipelines.programs.model_runner import ModelRunner
from staticllm.pipelines.programs.window_runner import AlignmentRunner, WindowRunner

sys.path.append(str(Path(__file__).resolve().parents[2] / "support" / "models"))
from speech_model import (
    DECODER,
    ENCODER,
    FRAMES,
    HEAD_DIM,
    LAYERS,
    OriginalSpeech,
    features,
    write_decoder,
    write_encoder,
    write_speech_model,
)

EXACT = {"INFERENCE_PRECISION_HINT": "f32"}
VARIANTS = (Variant(8, 0), Variant(8, 32), Variant(4, 32, 4), Variant(1, 32))


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = write_speech_model(tmp_path_factory.mktemp("speech"))
    return folder, OriginalSpeech(folder)


def read(folder, name):
    return get_core().read_model(folder / f"{name}.xml")


def runners(folder, num_cross_windows, kv_type="f32", shared=()):
    """A runner of the decoder, and one of its windows. The variants that are ``shared`` have one program."""
    lowered = lower(
        read(folder, DECODER),
        LoweringOptions(32, kv_type, cross_window_len=FRAMES, num_cross_windows=num_cross_windows),
    )
    apart = [each for each in VARIANTS if each not in shared]
    programs = {each: get_core().compile_model(lowered.specialise(each), "CPU", EXACT) for each in apart}
    if shared:
        programs |= dict.fromkeys(shared, get_core().compile_model(lowered.share(tuple(shared)), "CPU", EXACT))
    cache = KVCache(lowered.shape, [each.kv_len for each in VARIANTS])
    pool = BufferPool(VARIANTS, lowered.shape)
    bound = {each: bind(programs[each], lowered.shape, cache, StepBuffers(each, pool)) for each in VARIANTS}
    encoder = lower_cross_window(read(folder, ENCODER), read(folder, DECODER), kv_type)
    compiled = get_core().compile_model(encoder.specialise(CrossWindowVariant()), "CPU", EXACT)
    return ModelRunner(cache, bound), WindowRunner(encoder.shape, {CrossWindowVariant(): compiled})


@pytest.mark.parametrize(("kv_type", "tolerance"), [("f32", 1e-5), ("f16", 5e-3)])
def test_rows_of_several_windows_in_one_call_have_the_logits_of_the_original(original, kv_type, tolerance):
    folder, reference = original
    runner, encoder = runners(folder, 3, kv_type)
    windows = [features(seed) for seed in range(3)]
    numbers = [runner.cache.cross.add(encoder.run(window)) for window in windows]
    prompts = [[1, 2, 3], [1, 2, 3], [4, 5, 6, 7, 8]]
    sequences = [runner.cache.open(Conditions(cross_window=number)) for number in numbers]
    for sequence, window, prompt in zip(sequences, windows, prompts, strict=True):
        found = runner.prefill(sequence, prompt)
        np.testing.assert_allclose(found, reference.logits(window, prompt)[-1], atol=tolerance)
    for step in range(6):
        tokens = [(7 * step + place) % 50 for place in range(3)]
        segments = [Segment(s, np.array([token])) for s, token in zip(sequences, tokens, strict=True)]
        logits = runner.step(segments)
        for place, token in enumerate(tokens):
            prompts[place].append(token)
            expected = reference.logits(windows[place], prompts[place])[-1]
            np.testing.assert_allclose(logits[place], expected, atol=tolerance)


@pytest.mark.parametrize("shared", [VARIANTS, VARIANTS[1:], VARIANTS[:2]], ids=["all", "with a past", "prompts"])
def test_shared_programs_see_the_places_in_use_while_windows_come_and_go(original, shared):
    """Static programs between them see all places, so that the frames move to and fro."""
    folder, reference = original
    runner, encoder = runners(folder, 4, shared=shared)
    bank = runner.cache.cross
    random = np.random.default_rng(3)
    heard = {}  # number → the window, its sequence, and its tokens
    widths = set()
    for step in range(60):
        if heard and (not bank.num_free or random.random() < 0.3):
            number = random.choice(list(heard))
            runner.cache.close(heard.pop(number)[1])
            bank.remove(number)
        elif bank.num_free and random.random() < 0.5:
            window = features(100 + step)
            number = bank.add(encoder.run(window))
            heard[number] = (window, runner.cache.open(Conditions(cross_window=number)), [1, 2])
            runner.prefill(heard[number][1], heard[number][2])
        several = list(heard.values()) if random.random() < 0.7 else list(heard.values())[-1:]
        if not several:
            continue
        segments = [Segment(sequence, np.array([step % 50])) for _, sequence, _ in several]
        variant = runner.variant_for(segments)
        if variant is None:  # no slots are left
            break
        logits = runner.step(segments)
        width = runner.programs[variant].buffers.cross_mask.shape[-1] // FRAMES
        assert width == (bank.num_seen if variant in shared else 4)
        widths.add(width)
        for (window, _, tokens), found in zip(several, logits, strict=True):
            tokens.append(step % 50)
            np.testing.assert_allclose(found, reference.logits(window, tokens)[-1], atol=1e-5)
    assert step > 20 and ({1, 2, 3} <= widths or shared is not VARIANTS), widths


def test_a_place_is_used_again_and_its_number_never(original):
    folder, reference = original
    runner, encoder = runners(folder, 1)
    bank = runner.cache.cross
    numbers = []
    for seed in range(3):
        numbers.append(bank.add(encoder.run(features(seed))))
        assert not bank.num_free and numbers[-1] in bank
        found = runner.prefill(runner.cache.open(Conditions(cross_window=numbers[-1])), [1, 2])
        np.testing.assert_allclose(found, reference.logits(features(seed), [1, 2])[-1], atol=1e-5)
        bank.remove(numbers[-1])
        bank.remove(numbers[-1])  # a second time: nothing happens
        assert bank.num_free == 1
    assert len(set(numbers)) == 3


def test_a_window_that_is_not_finite_is_not_kept(original):
    _, encoder = runners(original[0], 1)
    assert encoder.run(np.full_like(features(0), np.nan)) is None
    assert encoder.run(features(0)) is not None


def test_programs_keep_the_names_and_number_of_the_states(original):
    folder, _ = original
    lowered = lower(read(folder, DECODER), LoweringOptions(24, cross_window_len=FRAMES, num_cross_windows=2))
    names = {port.get_any_name() for port in lowered.specialise(Variant(4, 20)).inputs}
    cross = {f"cross.{layer}.{role}" for layer in range(LAYERS) for role in ("key", "value")}
    assert cross | {"cross_mask"} <= names and "encoder_hidden_states" not in names
    encoder = lower_cross_window(read(folder, ENCODER), read(folder, DECODER), "f32")
    assert {port.get_any_name() for port in encoder.model.outputs} == cross
    assert not encoder.model.get_sinks()


def test_an_alignment_program_returns_the_weights_of_the_original(original):
    folder, _ = original
    heads, tokens = [(0, 1), (1, 0)], [3, 1, 4, 1, 5]
    lowered = lower_alignment(read(folder, DECODER), heads, 12, FRAMES, "f32")
    runner = AlignmentRunner(
        lowered.shape,
        {CrossWindowVariant(): get_core().compile_model(lowered.specialise(CrossWindowVariant()), "CPU", EXACT)},
    )
    _, encoder = runners(folder, 1)
    found = runner.run(tokens, encoder.run(features(3)))
    expected = attention_weights(folder, features(3), tokens)
    for index, (layer, head) in enumerate(heads):
        np.testing.assert_allclose(found[index], expected[layer][head], atol=1e-5)
    with pytest.raises(UnsupportedModelError, match=r"\(7, 0\)"):
        lower_alignment(read(folder, DECODER), [(7, 0)], 12, FRAMES, "f32")


def attention_weights(folder, window, tokens):
    """Return what each cross-attention of the original weighs, ``[heads, tokens, FRAMES]``, from its queries and keys."""
    hidden = get_core().compile_model(folder / f"{ENCODER}.xml", "CPU", EXACT)(window[None])[0]
    model = read(folder, DECODER)
    attentions = [node for node in model.get_ordered_ops() if node.get_type_name() == "ScaledDotProductAttention"][1::2]
    results = [ops.result(node.input_value(port)) for node in attentions for port in (0, 1)]
    part = ov.Model([*results, *model.get_results()], model.get_sinks(), model.get_parameters())
    feeds = {"input_ids": np.array([tokens]), "encoder_hidden_states": hidden, "beam_idx": np.zeros(1, np.int32)}
    values = list(get_core().compile_model(part, "CPU", EXACT).create_infer_request().infer(feeds).values())
    found = []
    for query, key in zip(values[0 : 2 * LAYERS : 2], values[1 : 2 * LAYERS : 2], strict=True):
        scores = query[0] @ key[0].transpose(0, 2, 1) * HEAD_DIM**-0.5
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        found.append(weights / weights.sum(axis=-1, keepdims=True))
    return found


def test_models_that_cannot_be_joined_are_refused(original, tmp_path):
    folder, _ = original
    with pytest.raises(UnsupportedModelError, match="its encoder belongs to it"):
        lower(read(folder, DECODER), LoweringOptions(24))
    with pytest.raises(UnsupportedModelError, match="no cross-attention to an encoder's output"):
        lower_cross_window(read(folder, ENCODER), read(folder, ENCODER), "f32")
    write_decoder(tmp_path, cross_mask=-1e9)
    with pytest.raises(UnsupportedModelError, match="hides frames"):
        lower(read(tmp_path, DECODER), LoweringOptions(24, cross_window_len=FRAMES, num_cross_windows=1))
    write_encoder(tmp_path)
    model = read(tmp_path, ENCODER)
    model.reshape(ov.PartialShape([-1, 4, -1]))
    with pytest.raises(UnsupportedModelError, match="bands and columns must be known"):
        lower_cross_window(model, read(folder, DECODER), "f32")
