"""Tests requests with LoRA adapters: GenAI's objects and modes, every way of generating, and mistakes."""

from __future__ import annotations

import json
import shutil

import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest
from support.engine.engine_drafters import always_drafting
from support.helpers import PROMPT, SHORT, one_line
from support.models.adapter_models import COUNT, answer, config_of
from support.models.lora_files import PREFIX, Lora, safetensors_bytes

from staticllm import (
    Adapter,
    AdapterConfig,
    AdapterError,
    ConfigError,
    StaticLLMPipeline,
    draft_model,
)
from staticllm.pipelines.engine.request import EngineRequest
from staticllm.testing import fake_answer
from staticllm.testing.pipeline import fake_pipeline
from tests.support.inside import launched_of


@pytest.mark.parametrize("mode", ["MODE_AUTO", "MODE_DYNAMIC", "MODE_STATIC_RANK", "MODE_STATIC"])
def test_all_other_modes_use_inputs(mode, llama, handles):
    config = AdapterConfig(handles[0], 0.5, getattr(AdapterConfig.Mode, mode))
    with StaticLLMPipeline(llama.path, "CPU", adapters=config, **SHORT) as pipe:
        assert answer(pipe) == llama.tokens(0.5, 0.0)
        assert answer(pipe, AdapterConfig(handles[0], 1.0)) == llama.tokens(1.0, 0.0)


def test_genais_own_objects_are_taken(llama):
    """Also copies of them: an AdapterConfig and a GenerationConfig give back other objects than they were given."""
    first, second = (genai.Adapter(str(path)) for path in llama.files())
    in_memory = genai.Adapter(ov.Tensor(np.frombuffer(llama.files()[1].read_bytes(), np.uint8).copy()))
    config = genai.AdapterConfig()
    config.add(first, 0.75)
    config.add(second)
    with StaticLLMPipeline(llama.path, "CPU", {**SHORT, "adapters": config}) as pipe:
        assert answer(pipe) == llama.tokens(0.75, 1.0)
        generation = genai.GenerationConfig()
        generation.adapters = genai.AdapterConfig([(first, 1.0)])
        generation.max_new_tokens, generation.ignore_eos = COUNT, True
        assert list(pipe.generate(np.array(PROMPT), generation).tokens[0]) == llama.tokens(1.0, 0.0)
        assert answer(pipe, genai.AdapterConfig(in_memory)) == llama.tokens(
            0.0, 1.0
        )  # the same numbers, another object
        assert answer(pipe, genai.AdapterConfig(genai.Adapter(str(llama.files()[0])), 0.5)) == llama.tokens(0.5, 0.0)
        own = pipe.get_generation_config()
        assert [alpha for _, alpha in own.adapters.get_adapters_and_alphas()] == [0.75, 1.0]
        pipe.set_generation_config(generation)
        assert answer(pipe) == llama.tokens(1.0, 0.0)


def test_mistakes_with_requests_get_one_line(adapted_pipe, llama, handles, tmp_path):
    stranger = Adapter(Lora(llama.path, ("q_proj",), seed=5).save(tmp_path / "stranger"))
    gone = tmp_path / "gone.safetensors"
    shutil.copyfile(llama.files()[0], gone)
    unread = genai.Adapter(str(gone))
    gone.unlink()
    for value, kind in (
        (AdapterConfig(stranger), AdapterError),
        (genai.AdapterConfig(unread), AdapterError),
        (handles[0], ConfigError),
        ("lora", ConfigError),
        (AdapterConfig(handles[0], float("nan")), ConfigError),
        (AdapterConfig(handles[0], float("inf")), ConfigError),
        (AdapterConfig(Adapter.__mro__[1]()), AdapterError),
    ):
        with pytest.raises(kind) as caught:
            answer(adapted_pipe, value)
        one_line(caught)
    assert answer(adapted_pipe, AdapterConfig(handles[0])) == llama.tokens(1.0, 0.0)
    with StaticLLMPipeline(llama.path, "CPU", **SHORT) as plain:
        with pytest.raises(AdapterError, match="without adapters") as caught:
            answer(plain, AdapterConfig(handles[0]))
        one_line(caught)
        assert answer(plain, AdapterConfig()) == llama.tokens()


def test_adapters_that_do_not_fit_the_model_get_one_line(llama, tmp_path):
    path = next(iter(llama.loras[0].matrices))
    a, b = llama.loras[0].matrices[path]
    cases = {
        "no linear layer": {f"{PREFIX}model.layers.9.mlp.up_proj": (a, b)},
        "another model": {PREFIX + path: (a[:, :-1], b)},
        "rank": {PREFIX + path: (np.zeros((600, a.shape[1]), np.float32), np.zeros((b.shape[0], 600), np.float32))},
    }
    for index, (message, layers) in enumerate(cases.items()):
        handles = []
        for number in range(2):
            file = tmp_path / f"{index}-{number}.safetensors"
            tensors = {
                f"{name}.lora_{side}.weight": value + number
                for name, pair in layers.items()
                for side, value in zip("AB", pair, strict=True)
            }
            file.write_bytes(safetensors_bytes(tensors))
            handles.append(Adapter(file))
        with pytest.raises(AdapterError, match=message) as caught:
            StaticLLMPipeline(llama.path, "CPU", adapters=AdapterConfig(handles), **SHORT)
        one_line(caught)


def test_programs_without_adapters_have_none_of_their_inputs(llama):
    with StaticLLMPipeline(llama.path, "CPU", **SHORT) as pipe:
        compiled = next(iter(launched_of(pipe).loaded.programs.compiled.values()))
    assert not [name for port in compiled.inputs for name in port.get_names() if name.startswith("adapter")]


def test_a_fake_pipeline_tells_adapters_apart(llama, handles):
    with fake_pipeline(adapters=AdapterConfig(handles)) as pipe:
        for factors in ((1.0, 0.0), (0.5, 1.0), ()):
            found = answer(pipe, config_of(handles, factors), count=5)
            assert found == fake_answer(PROMPT, 5, vocab_size=pipe.vocab_size, adapters=factors)[len(PROMPT) :]


def test_requests_with_adapters_survive_the_way_to_another_process():
    request = EngineRequest((1, 2), adapters=(0.5, 0.0))
    plain = json.loads(json.dumps(request.to_dict()))
    assert EngineRequest.from_dict(plain).adapters == (0.5, 0.0)


WAYS = {
    "answers": {"do_sample": True, "num_return_sequences": 3, "rng_seed": 5, "temperature": 1.2},
    "beams": {"num_beams": 4, "num_return_sequences": 2},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
    "prompt lookup": {"max_ngram_size": 2, "num_assistant_tokens": 3},
    "long conversations": {"overflow": "shift", "max_new_tokens": 90},
    "moved keys": {"overflow": "context_shift", "max_new_tokens": 90},
}
"""Ways of generating that fork, reorder, cut or move the slots of a sequence."""


@pytest.fixture(scope="module")
def merged_pipe(llama):
    llama.reference(0.5, 1.0)
    folder = llama.folder / f"merged{list(llama._references).index((0.5, 1.0))}"
    with StaticLLMPipeline(folder, "CPU", **SHORT) as pipe:
        yield pipe


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_generating_keeps_its_adapters(way, adapted_pipe, merged_pipe, handles):
    """Beside other requests with other adapters, and compared with a pipeline of merged weights."""
    prompt, options = (
        np.array([*PROMPT[:9], *PROMPT[:9], *PROMPT[:4]]),
        {"max_new_tokens": 16, "ignore_eos": True, **WAYS[way]},
    )
    other = adapted_pipe.submit(prompt, adapters=AdapterConfig(handles[0]), max_new_tokens=40, ignore_eos=True)
    found = adapted_pipe.generate(prompt, adapters=config_of(handles, (0.5, 1.0)), **options)
    other.result()
    expected = merged_pipe.generate(prompt, **options)
    assert found.tokens == expected.tokens
    assert found.tokens != adapted_pipe.generate(prompt, adapters=AdapterConfig(), **options).tokens


def test_a_draft_model_has_no_adapters_and_guesses_all_the_same(llama, handles):
    """The original drafts for requests with adapters, whose tokens differ, and for requests without."""
    with (
        always_drafting(),
        StaticLLMPipeline(
            llama.path, "CPU", adapters=AdapterConfig(handles), draft_model=draft_model(llama.path), **SHORT
        ) as pipe,
    ):
        for factors in ((0.5, 1.0), (), (1.0, 0.0)):
            found = pipe.generate(
                np.array(PROMPT), adapters=config_of(handles, factors), max_new_tokens=24, ignore_eos=True
            )
            assert list(found.tokens[0]) == llama.tokens(*factors, count=24)
        assert pipe.stats().drafted_tokens
