"""A model's own generation_config.json, and configs made from it: what has no effect in a request stops no request."""

from __future__ import annotations

import json
import shutil

import openvino_genai as genai
import pytest

from staticllm import StaticLLMPipeline, demo_model_path
from staticllm.errors import GenerationConfigError, quoted
from staticllm.pipelines.diagnostics.doctor import check_model
from staticllm.pipelines.diagnostics.reference import EXACT
from staticllm.pipelines.generation.options.resolve import NAMES, unreadable_field
from tests.support.inside import inputs_of

pytestmark = pytest.mark.usefixtures("shared_programs")

WITHOUT_EFFECT = {
    "num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.4,
    "branching_factor": 4, "temperature": -1, "top_p": 7, "min_p": 3, "num_beams": 0, "num_beam_groups": 9,
    "diversity_penalty": 1.0, "length_penalty": 1e9, "max_length": 2, "eos_token_id": [1, 10**9], "penalty_alpha": 0.6,
}  # fmt: skip


@pytest.fixture(scope="module")
def expected():
    with StaticLLMPipeline(demo_model_path(), "CPU", MAX_PROMPT_LEN=128, **EXACT) as pipe:
        yield pipe.generate("Hello", max_new_tokens=5)


def model_with(folder, fields):
    model = shutil.copytree(demo_model_path(), folder / "model")
    path = model / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_new_tokens": 5, **fields}))
    return model


def test_fields_of_the_file_without_effect_stop_no_request(tmp_path, expected):
    model = model_with(tmp_path, WITHOUT_EFFECT)
    with StaticLLMPipeline(model, "CPU", MAX_PROMPT_LEN=128, **EXACT) as pipe:
        assert pipe.generate("Hello") == expected
        assert pipe.generate("Hello", pipe.get_generation_config()) == expected
        pipe.set_generation_config(pipe.get_generation_config())
        assert pipe.generate("Hello") == expected
        assert pipe.generate("Hello", streamer=lambda text: None) == expected
        assert "".join(pipe.submit("Hello")) == expected
        history = genai.ChatHistory()
        history.append({"role": "user", "content": "Hello"})
        assert pipe.generate(history).texts == [expected]
        for name, words in (("num_assistant_tokens", "without a draft model"), ("top_p", "top_p=7")):
            with pytest.raises(GenerationConfigError, match=words):
                pipe.generate("Hello", **{name: WITHOUT_EFFECT[name]})
        with pytest.raises(GenerationConfigError, match="temperature=-1"):
            pipe.generate("Hello", do_sample=True)  # now it has an effect


def test_a_request_may_ask_for_less_than_the_file_has_at_least(tmp_path, expected):
    model = model_with(tmp_path, {"min_new_tokens": 5})
    with StaticLLMPipeline(model, "CPU", MAX_PROMPT_LEN=128, **EXACT) as pipe:
        assert expected.startswith(pipe.generate("Hello", max_new_tokens=2))
        with pytest.raises(GenerationConfigError, match="min_new_tokens=4 is more than max_new_tokens=2"):
            pipe.generate("Hello", max_new_tokens=2, min_new_tokens=4)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"stop_strings": [""]},
            "stop_strings={''}: must be a set of non-empty strings; correct stop_strings in this file",
        ),
        (
            {"repetition_penalty": 0},
            "repetition_penalty=0.0: must be a number from 0.001, up to 1000; correct repetition_penalty",
        ),
        ({"tree_depth": 1}, "tree_depth=1 is not supported"),
        ({"min_new_tokens": 9}, "min_new_tokens=9 is more than max_new_tokens=5; correct min_new_tokens in this file"),
        ({"num_beams": 2, "do_sample": True}, "do_sample=True with num_beams=2"),
    ],
)
def test_an_impossible_field_is_named_with_its_file(fields, said, tmp_path):
    model = model_with(tmp_path, fields)
    with StaticLLMPipeline(model, "CPU", MAX_PROMPT_LEN=128, **EXACT) as pipe:
        with pytest.raises(GenerationConfigError) as error:
            pipe.generate("Hello", rng_seed=3)
        assert str(error.value).startswith(f"{quoted(model / 'generation_config.json')}: {said}")
        with pytest.raises(GenerationConfigError, match=r"^top_k=-7"):
            pipe.generate("Hello", top_k=-7)  # the fault of the request has no file
        changed = pipe.get_generation_config()
        changed.frequency_penalty = 9.0
        with pytest.raises(GenerationConfigError, match=r"^frequency_penalty=9"):
            pipe.generate("Hello", changed)
    found = check_model(str(model), "CPU", None, lambda event: None)
    assert found.level == "fail"
    assert found.remedy == "correct the field in generation_config.json, or remove it there"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"eos_token_id": "1"}, "eos_token_id='1': must be a token id, or a list of them"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id=[1, '2']: must be a token id, or a list of them"),
        ({"max_new_tokens": "5"}, "max_new_tokens='5': must be a number"),
        ({"do_sample": 1}, "do_sample=1: must be true or false"),
        ({"stop_strings": [5]}, "stop_strings=[5]: must be a list of str"),
        ({"num_assistant_tokens": "x"}, "num_assistant_tokens='x': must be a whole number"),
    ],
)
def test_a_field_of_a_wrong_type_is_named_with_its_file(fields, said, tmp_path):
    model = model_with(tmp_path, fields)
    with pytest.raises(GenerationConfigError) as error:
        StaticLLMPipeline(model, "CPU", MAX_PROMPT_LEN=128, **EXACT)
    assert str(error.value) == f"{quoted(model / 'generation_config.json')}: {said}; correct it in this file"
    found = check_model(str(model), "CPU", None, lambda event: None)
    assert found.remedy == "correct the field in generation_config.json, or remove it there"


def test_every_type_that_genai_cannot_read_is_found(tmp_path):
    path = tmp_path / "generation_config.json"
    for name in NAMES:
        for value in ("1", 1, 1.5, True, [1], ["a"], [], {}, None):
            path.write_text(json.dumps({name: value}))
            try:
                genai.GenerationConfig(path)
            except RuntimeError:
                assert unreadable_field(path.read_text()), (name, value)


CLASHES = (
    ({"min_new_tokens": 5}, {"max_new_tokens": 2}),
    ({"max_new_tokens": 2}, {"min_new_tokens": 3}),
    ({"repetition_penalty": 0}, {"repetition_penalty": 1.2}),
    ({"repetition_penalty": 1.2}, {"num_beams": 2}),
    ({"num_beams": 3}, {"do_sample": True}),
    ({"num_beams": 3}, {"logit_bias": {5: 1.0}}),
    ({"num_beams": 3, "num_return_sequences": 3}, {"num_beams": 2}),
    ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}, {"num_beams": 3}),
    ({"do_sample": True, "num_return_sequences": 3}, {"do_sample": False}),
    ({"num_beams": 2}, {"max_ngram_size": 3, "num_assistant_tokens": 3}),
    ({"max_ngram_size": 3, "num_assistant_tokens": 5}, {"best_of": 2, "do_sample": True}),
)


@pytest.mark.parametrize(("fields", "asked"), CLASHES)
def test_what_a_request_says_wins_over_the_file(fields, asked, tmp_path):
    model = model_with(tmp_path, fields)
    with StaticLLMPipeline(model, "CPU", MAX_PROMPT_LEN=128, **EXACT) as pipe:
        assert pipe.generate(["Hello"], rng_seed=3, **asked).texts
        options = inputs_of(pipe).call("text", None, dict(asked)).options
        most = {"max_new_tokens": 5, **fields, **asked}["max_new_tokens"]
        assert options.max_new_tokens == max(most, asked.get("min_new_tokens", 0)), "no answer is without a limit"


def test_a_derived_config_wins_over_the_file_it_was_made_from(tmp_path):
    model = model_with(tmp_path, {"min_new_tokens": 5, "repetition_penalty": 1.2})
    with StaticLLMPipeline(model, "CPU", MAX_PROMPT_LEN=128, **EXACT) as pipe:
        config = pipe.get_generation_config()
        config.max_new_tokens, config.num_beams = 2, 2
        assert len(pipe.generate(["Hello"], config).texts) == 1
        with pytest.raises(GenerationConfigError, match=r"^do_sample=True with num_beams=2"):
            pipe.generate("Hello", config, do_sample=True)  # both are of this request


def test_drafts_of_the_file_are_left_out_where_there_can_be_none(tmp_path):
    model = model_with(tmp_path, {"max_ngram_size": 3, "num_assistant_tokens": 5})
    with StaticLLMPipeline(model, "CPU", MAX_PROMPT_LEN=128, **EXACT) as pipe:
        assert len(pipe.generate(["Hello"], num_beams=2, num_return_sequences=2).texts) == 2
        with pytest.raises(GenerationConfigError, match="num_assistant_tokens=4 with num_beams=2"):
            pipe.generate("Hello", num_beams=2, num_assistant_tokens=4, max_ngram_size=0)


def test_a_negative_seed_is_random():
    with StaticLLMPipeline(demo_model_path(), "CPU", MAX_PROMPT_LEN=128, **EXACT) as pipe:
        options = {"do_sample": True, "temperature": 3.0, "max_new_tokens": 8}
        assert len({pipe.generate("Hello", rng_seed=-1, **options) for _ in range(4)}) > 1
        assert len({pipe.generate("Hello", rng_seed=3, **options) for _ in range(4)}) == 1
        with pytest.raises(GenerationConfigError, match=r"rng_seed=1\.5: must be a whole number of 0 or more"):
            pipe.generate("Hello", rng_seed=1.5)
