"""Tests that pipelines in the daemon have drafts, adapters, beams with stop strings, and snapshots with adapters."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest
from support.attach.daemons import daemon_thread
from support.engine.engine_drafters import always_drafting
from support.helpers import EXACT, PROMPT, SHORT, one_line
from support.models.adapter_models import answer, config_of

import staticllm
from staticllm import Adapter, AdapterConfig, AdapterError, ConfigError, StaticLLMPipeline, draft_model
from staticllm.daemon.models.client_models import directory_origin_of
from staticllm.errors import GenerationConfigError, ModelError, PromptError
from staticllm.pipelines.engine.request import EngineRequest
from staticllm.pipelines.generation.beam_search import BeamParams
from staticllm.pipelines.generation.genai_adapters import adapter_set_of
from staticllm.wire.messages import Kind, Message, ProtocolError

QUESTION = "What is an NPU?"


@pytest.fixture
def daemon(monkeypatch, tmp_path):
    with always_drafting(), daemon_thread(monkeypatch, tmp_path / "run") as daemon:
        yield daemon


def test_requests_have_their_adapters_and_drafts(daemon, llama, tmp_path):
    handles = [Adapter(llama.directories[0]), Adapter(llama.files()[1])]
    plain = [Adapter(path) for path in llama.files()]
    more = {"adapters": AdapterConfig(handles), "draft_model": draft_model(llama.path, "CPU", **EXACT)}
    with StaticLLMPipeline(llama.path, "CPU", adapters=AdapterConfig(handles), **SHORT) as here:
        of_directory = answer(here, config_of(handles, (1.0, 0.5)))
    with StaticLLMPipeline(llama.path, "CPU", daemon=True, **more, **SHORT) as pipe:
        assert answer(pipe, config_of(handles, (1.0, 0.5))) == of_directory
        assert answer(pipe, AdapterConfig(handles[1], 1.0)) == llama.tokens(0.0, 1.0)
        assert answer(pipe, AdapterConfig()) == llama.tokens()
        found = pipe.generate(np.array(PROMPT), adapters=AdapterConfig(), max_new_tokens=24, ignore_eos=True)
        assert list(found.tokens[0]) == llama.tokens(count=24)
        assert pipe.stats().drafted_tokens
        with pytest.raises(AdapterError, match="loaded without"):
            answer(pipe, config_of(plain, (1.0, 0.0)))  # a file is not the directory: another scale
        answer(pipe)  # with the adapters of the pipeline, as the snapshot
        count = pipe.save_snapshot(tmp_path / "snapshot", np.array(PROMPT))
        assert count >= len(PROMPT) - 1
    daemon.models.drop_idle(0.0)
    with StaticLLMPipeline(llama.path, "CPU", daemon=True, **more, **SHORT) as pipe:
        assert pipe.load_snapshot(tmp_path / "snapshot") == count


def test_other_adapters_and_drafts_are_another_engine(daemon, llama):
    first, second = (AdapterConfig(Adapter(path)) for path in llama.files())
    given = ({"adapters": first}, {"adapters": first}, {"adapters": second}, {"draft_model": draft_model(llama.path)})
    pipes = [StaticLLMPipeline(llama.path, "CPU", daemon=True, **more, **SHORT) for more in given]
    assert sorted(slot.num_users for slot, _ in daemon.models.served()) == [1, 1, 2]
    for pipe in pipes:
        pipe.close()


def test_adapters_are_folded_into_the_weights_there_too(daemon, llama):
    config = AdapterConfig([(Adapter(llama.files()[0]), 0.75)], AdapterConfig.Mode.MODE_FUSE)
    with StaticLLMPipeline(llama.path, "CPU", daemon=True, adapters=config, **SHORT) as pipe:
        assert answer(pipe) == llama.tokens(0.75)


def test_stop_strings_end_beams_there_too(daemon):
    options = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 24, "stop_strings": {"unit", "ing"}}
    path = staticllm.demo_model_path()
    with StaticLLMPipeline(path, "CPU", **SHORT) as here, StaticLLMPipeline(path, "CPU", daemon=True, **SHORT) as there:
        expected, found = here.generate([QUESTION], **options), there.generate([QUESTION], **options)
        assert found.texts == expected.texts
        assert found.scores == pytest.approx(expected.scores, abs=1e-5)
        free = here.generate([QUESTION], **{**options, "stop_strings": set()})
        assert free.texts != expected.texts  # so the stop strings did something
        tokenizer = genai.Tokenizer(path)
    with (
        StaticLLMPipeline(path, tokenizer, "CPU", daemon=True, **SHORT) as other,
        pytest.raises(GenerationConfigError, match="stop_strings of beams with tokenizer="),
    ):
        other.generate([QUESTION], **options)


def test_mistakes_get_one_line_and_their_own_class(daemon, llama, model_path, tmp_path):
    lora = llama.files()[0]
    in_memory = genai.Adapter(ov.Tensor(np.frombuffer(lora.read_bytes(), np.uint8).copy()))
    wrong = (
        ({"adapters": AdapterConfig(in_memory)}, ConfigError, "write it to a file"),
        ({"draft_model": draft_model(model_path("lfm2"))}, ConfigError, "recurrent|tokenizer"),
        ({"draft_model": draft_model(tmp_path / "none")}, ModelError, "none"),
        ({"draft_model": draft_model(llama.path, NO_SUCH=1)}, ConfigError, "NO_SUCH"),
        (
            {"draft_model": draft_model(llama.path, scheduler_config=genai.SchedulerConfig())},
            ConfigError,
            "cannot be sent",
        ),
    )
    for more, kind, text in wrong:
        with pytest.raises(kind, match=text) as caught:
            StaticLLMPipeline(llama.path, "CPU", daemon=True, **more, **SHORT)
        one_line(caught)
    config = AdapterConfig(Adapter(lora))
    pipe = StaticLLMPipeline(llama.path, "CPU", daemon=True, adapters=config, **SHORT)
    model = daemon.models.served()[0][1]
    pipe.close()
    request = EngineRequest(tuple(PROMPT)).to_dict()
    beams = EngineRequest(tuple(PROMPT), beams=BeamParams(3)).to_dict()
    for values in (
        {**request, "adapters": [1.0, 1.0]}, {**request, "adapters": ["x"]}, {**request, "adapters": [1e300]},
        {**request, "adapters": [None]}, {**request, "stop_strings": ["a"]}, {**beams, "stop_strings": [1]},
        {**beams, "stop_strings": [""]}, {**beams, "stop_strings": ["x" * 70000]},
    ):  # fmt: skip
        with pytest.raises((ConfigError, PromptError)):
            model.request_of(values)


@pytest.mark.skipif(sys.platform == "win32", reason="a file that is mapped cannot be written there")
def test_an_adapter_that_changed_after_the_program_read_it_is_an_error(daemon, llama, tmp_path):
    path = tmp_path / "changed.safetensors"
    path.write_bytes(llama.files()[0].read_bytes())
    origin = directory_origin_of(message_of(llama.path, path, adapter_set_of(AdapterConfig(Adapter(path)))))
    assert origin.loadable()[0].config.adapters.adapters[0].path == path
    assert origin.num_bytes > 3 * path.stat().st_size
    path.write_bytes(llama.files()[1].read_bytes())
    with pytest.raises(AdapterError, match="has changed since the program read it") as caught:
        origin.loadable()
    one_line(caught)


HERE = str(Path("x").absolute())


def message_of(directory, path, adapters):
    (adapter,) = adapters.adapters
    config = {"candidates": [{"device": "CPU", "config": {}}], "directory": str(directory)}
    return Message(
        Kind.MODEL, body={**config, "adapters": {"members": [[str(path), adapter.name, 1.0]], "is_fused": False}}
    )


@pytest.mark.parametrize(
    "body",
    [
        {"adapters": []}, {"adapters": {"members": [], "is_fused": 1}}, {"adapters": {"members": 5, "is_fused": True}},
        {"adapters": {"members": [["a", "b", 1.0]], "is_fused": False}},
        {"adapters": {"members": [[HERE, "b", "c"]], "is_fused": False}},
        {"adapters": {"members": [[HERE, "b"]], "is_fused": False}},
        {"adapters": {"members": [[HERE, "b", 1.0]] * 65, "is_fused": False}},
        {"draft": 5}, {"draft": {"directory": "x", "device": "CPU", "properties": {}}},
        {"draft": {"directory": HERE, "device": 5, "properties": {}}},
        {"draft": {"directory": HERE, "device": "CPU", "properties": []}},
        {"candidates": [{"device": "CPU", "config": {"adapters": [1]}}]},
    ],
)  # fmt: skip
def test_a_client_that_lies_about_adapters_and_drafts_is_refused(body):
    good = {"candidates": [{"device": "CPU", "config": {}}], "directory": HERE}
    directory_origin_of(Message(Kind.MODEL, body=good))
    with pytest.raises(ProtocolError):
        directory_origin_of(Message(Kind.MODEL, body={**good, **body}))


def test_a_grammar_of_a_request_there_has_its_times_and_its_limit(daemon):
    pytest.importorskip("llguidance")
    with StaticLLMPipeline(staticllm.demo_model_path(), "CPU", daemon=True, **SHORT) as pipe:
        result = pipe.generate([QUESTION], regex="[0-9]{3}", num_beams=2, max_new_tokens=9)
        assert len(result.texts[0]) == 3
        assert result.texts[0].isdecimal()
        metrics = result.perf_metrics
        assert len(metrics.raw_metrics.grammar_compile_times) == 1
        assert metrics.get_grammar_compile_time().mean > 0
        assert metrics.get_grammar_compiler_init_times()["llguidance"] > 0
        with pytest.raises(ConfigError, match="cannot go to the daemon") as caught:  # its text is escaped on the way
            pipe.generate(QUESTION, grammar='root ::= "a" # ' + '"' * 700_000)
        one_line(caught)
        with pytest.raises(GenerationConfigError, match="the most are 1048576") as caught:
            pipe.generate(QUESTION, regex="a" * 1_100_000)
        one_line(caught)
        assert pipe.generate([QUESTION], choice=["yes"], max_new_tokens=9).texts == ["yes"]
