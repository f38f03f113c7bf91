"""Programs over pages: what they refuse, and that the proof finds graphs which compute other numbers than the model."""

import sys
import threading
import time
from dataclasses import replace

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from staticllm import StaticLLMPipeline
from staticllm.compiler_passes.decoder import PAGED, PAGED_FORMS
from staticllm.compiler_passes.graph.paged_graph import WINDOW, PagedGraph, paged_attentions, window_of
from staticllm.compiler_passes.inputs.prove_pages import prove_pages
from staticllm.compiler_passes.lower import lower_paged
from staticllm.compiler_passes.pass_pipeline import LoweringOptions
from staticllm.compiler_passes.states.page_attention import page_attention
from staticllm.devices import get_core
from staticllm.errors import ClosedError, DeviceError, UnsupportedModelError
from staticllm.kvcache.paged import PagedKVCache
from staticllm.pipelines.diagnostics.costs import wait_for_costs
from staticllm.pipelines.loading import load
from staticllm.system.long_calls import unless

OPTIONS = LoweringOptions(128)
ALIBI, SCALE = 11, 9
"""Inputs of the operation: the slopes of a bias by distance, and the factor on scores."""


def read(folder):
    return get_core().read_model(folder / "openvino_model.xml")


def paged(folder):
    model = read(folder)
    graph = PagedGraph(model.clone(), original=model)
    page_attention(graph, "f32", 2048)
    return graph


@pytest.mark.parametrize(("name", "windows"), [("llama", [0] * 3), ("gemma2", [32, 0, 32, 0])])
def test_layers_have_pages_and_the_windows_of_the_model(zoo, name, windows):
    lowered = lower_paged(read(zoo / name), OPTIONS)
    assert [window_of(node) for node in paged_attentions(lowered.graph.model)] == windows
    assert lowered.shape.page_size == 32
    assert len(lowered.shape.kv_states) == 2 * len(windows)
    assert lowered.graph.query_heads == [4] * len(windows)


def narrower(graph):
    paged_attentions(graph.model)[-1].input(WINDOW).replace_source_output(ops.constant(np.int32(20)).output(0))


def flatter(graph):
    port = paged_attentions(graph.model)[0].input(ALIBI)
    port.replace_source_output(ops.multiply(port.get_source_output(), np.float32(0.9)).output(0))


def sharper(graph):
    port = paged_attentions(graph.model)[0].input(SCALE)
    port.replace_source_output(ops.multiply(port.get_source_output(), np.float32(1.1)).output(0))


@pytest.mark.parametrize(("name", "spoil"), [("llama", narrower), ("bloom", flatter), ("qwen2", sharper)])
def test_the_proof_finds_an_attention_that_computes_other_numbers(zoo, name, spoil):
    graph = paged(zoo / name)
    spoil(graph)
    with pytest.raises(UnsupportedModelError, match="other values than the model") as error:
        prove_pages(graph)
    assert error.value.stage == "prove_pages"


def test_a_state_that_changes_before_it_is_stored_is_found(zoo):
    """The transformation drops what lies between; the original's second call reads it."""
    model = read(zoo / "llama")
    for sink in model.get_sinks():
        sink.input(0).replace_source_output(ops.multiply(sink.input_value(0), np.float32(2)).output(0))
    with pytest.raises(UnsupportedModelError, match="other values than the model"):
        lower_paged(model, OPTIONS)


@pytest.mark.parametrize("name", ["lfm2", "granitemoehybrid"])
def test_recurrent_states_are_refused_and_served_without_pages(zoo, name):
    with pytest.raises(UnsupportedModelError, match=r"adds the input 'la\."):
        lower_paged(read(zoo / name), OPTIONS)
    with pytest.raises(UnsupportedModelError, match=r"adds the input 'la\."):
        StaticLLMPipeline(zoo / name, "CPU", PROGRAMS="paged", MAX_PROMPT_LEN=32)
    with StaticLLMPipeline(zoo / name, "CPU", MAX_PROMPT_LEN=32) as pipe:
        assert not pipe.engine.runner.cache.kv_states or pipe.engine.runner.cache.states


@pytest.mark.parametrize("kv_type", ["u8", "f16"])
def test_slots_of_other_types_are_refused(zoo, kv_type):
    with pytest.raises(UnsupportedModelError, match=f"no pages of {kv_type}"):
        lower_paged(read(zoo / "llama"), replace(OPTIONS, kv_type=kv_type))
    with pytest.raises(UnsupportedModelError, match="the type in which attention computes"):
        StaticLLMPipeline(zoo / "llama", "CPU", PROGRAMS="paged", KV_CACHE_PRECISION=kv_type, MAX_PROMPT_LEN=32)


def test_a_program_over_pages_leaves_the_original_as_it_was(zoo):
    model = read(zoo / "qwen2")
    before = [(node.get_type_name(), node.get_friendly_name()) for node in model.get_ordered_ops()]
    lower_paged(model, OPTIONS)
    assert [(node.get_type_name(), node.get_friendly_name()) for node in model.get_ordered_ops()] == before


def test_attention_is_narrowed_to_bf16_and_its_results_are_not(zoo):
    lowered = lower_paged(read(zoo / "llama"), replace(OPTIONS, kv_type="bf16", narrows_attention=True))
    for node in paged_attentions(lowered.graph.model):
        assert {node.input_value(place).get_element_type() for place in range(3)} == {ov.Type.bf16}
        (reader,) = node.output(0).get_target_inputs()
        assert reader.get_node().get_output_element_type(0) == ov.Type.f32


def test_the_proof_can_be_had_later(zoo):
    """The forms that follow do not change what it reads."""
    lowered = lower_paged(read(zoo / "llama"), OPTIONS, "beside compiling")
    assert [report.name for report in lowered.reports] == [entry.name for entry in (*PAGED.passes, *PAGED_FORMS.passes)]
    assert lowered.proof is not None
    first, second = lowered.proof()
    assert (first.name, second.name) == ("prove_rows", "prove_pages")
    assert "are within" in second.notes[0]
    for other in ("before compiling", "known"):
        assert lower_paged(read(zoo / "llama"), OPTIONS, other).proof is None


def refuted(graph):
    raise UnsupportedModelError("prove_pages", "other values than the model, says the test")


@pytest.mark.parametrize("cached", [False, True])
def test_a_proof_that_fails_beside_the_compiler_is_heard(zoo, tmp_path, monkeypatch, cached):
    """The model is served without pages, also from then on; nothing says that it was proven."""
    monkeypatch.setattr("staticllm.compiler_passes.decoder.prove_pages", refuted)
    place = {"CACHE_DIR": str(tmp_path)} if cached else {}
    for _ in range(2):
        with StaticLLMPipeline(zoo / "llama", "CPU", MAX_PROMPT_LEN=64, **place) as pipe:
            assert not isinstance(pipe.engine.runner.cache, PagedKVCache)
    assert not list(tmp_path.glob("costs-*/proofs.json"))
    with pytest.raises(UnsupportedModelError, match="says the test"):
        StaticLLMPipeline(zoo / "llama", "CPU", PROGRAMS="paged", MAX_PROMPT_LEN=64, **place)


def test_a_second_start_from_a_cache_proves_nothing_again(zoo, tmp_path, monkeypatch):
    """Unless what is kept of the proof is damaged; the programs compute the same either way."""
    calls = []

    def counted(graph):
        calls.append(graph)
        prove_pages(graph)

    monkeypatch.setattr("staticllm.compiler_passes.decoder.prove_pages", counted)
    found = []
    for turn in range(4):
        with StaticLLMPipeline(zoo / "llama", "CPU", CACHE_DIR=str(tmp_path), MAX_PROMPT_LEN=64) as pipe:
            found.append(pipe.generate(np.arange(8, 40), max_new_tokens=4, ignore_eos=True).tokens[0])
        (kept,) = tmp_path.glob("costs-*/proofs.json")
        if turn == 1:
            kept.write_text(kept.read_text(encoding="utf-8").replace("true", "false"), encoding="utf-8")
        assert len(calls) == (1, 1, 2, 2)[turn]
    assert all(tokens == found[0] for tokens in found)


def test_a_refuted_form_that_does_not_compile_is_refuted_first(zoo, monkeypatch):
    monkeypatch.setattr("staticllm.compiler_passes.decoder.prove_pages", refuted)
    compile_all = load.compile_all

    def only_without_pages(plan, on_progress):
        if plan.options.layout == "paged":
            raise DeviceError("no memory")
        return compile_all(plan, on_progress)

    monkeypatch.setattr(load, "compile_all", only_without_pages)
    with StaticLLMPipeline(zoo / "llama", "CPU", MAX_PROMPT_LEN=64) as pipe:
        assert not isinstance(pipe.engine.runner.cache, PagedKVCache)


def test_a_load_does_not_wait_for_a_proof_that_is_not_wanted(zoo, monkeypatch):
    may_end = threading.Event()
    monkeypatch.setattr("staticllm.compiler_passes.decoder.prove_pages", lambda graph: may_end.wait(60))
    begin = time.monotonic()
    with pytest.raises(ClosedError), unless(lambda: time.monotonic() - begin > 0.5):
        StaticLLMPipeline(zoo / "llama", "CPU", MAX_PROMPT_LEN=64)
    assert time.monotonic() - begin < 30
    may_end.set()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_cache_that_takes_no_files_is_told_and_not_used(zoo):
    with pytest.warns(RuntimeWarning, match="CACHE_DIR='/proc/none' cannot be used: No such file"):
        pipe = StaticLLMPipeline(zoo / "llama", "CPU", CACHE_DIR="/proc/none", MAX_PROMPT_LEN=64)
    with pipe:
        assert pipe.generate(np.arange(8, 40), max_new_tokens=4, ignore_eos=True).tokens[0]


def test_measuring_costs_between_two_turns_changes_neither(zoo, original):
    """Calls without a request are as large as they say, and write to no page of a sequence."""
    prompt = np.random.default_rng(4).integers(8, 1000, 100).tolist()
    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "MAX_PROMPT_LEN": 256}
    with StaticLLMPipeline(zoo / "llama", "CPU", **exact) as pipe:
        (first,) = pipe.generate(np.array(prompt), max_new_tokens=8, ignore_eos=True).tokens
        assert wait_for_costs(pipe.engine, 60)
        longer = [*prompt, *first, *prompt[:30]]
        result = pipe.generate(np.array(longer), max_new_tokens=8, ignore_eos=True)
        assert result.perf_metrics.get_num_cached_tokens() == len(prompt) + 7
        assert result.tokens[0] == original(zoo / "llama").greedy(longer, 8)


def test_a_prompt_beyond_the_old_limit_is_answered_by_default(zoo, original):
    """The tokens after 1,500 are those of the original in one call, in f32; so are those of a second turn."""
    prompt = np.random.default_rng(3).integers(8, 1000, 1500).tolist()
    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    with StaticLLMPipeline(zoo / "llama", "CPU", **exact) as pipe:
        assert pipe.config.max_seq_len == 2048, "the model's positions"
        (first,) = pipe.generate(np.array(prompt), max_new_tokens=8, ignore_eos=True).tokens
        assert first == original(zoo / "llama").greedy(prompt, 8)
        longer = [*prompt, *first, *prompt[:300]]
        (second,) = pipe.generate(np.array(longer), max_new_tokens=8, ignore_eos=True).tokens
        assert second == original(zoo / "llama").greedy(longer, 8)
