"""A model's own generation_config.json, and configs made from it: what has no effect in a request stops no request."""

from __future__ import annotations

import json
import shutil

import openvino_genai as genai
import pytest

from staticllm import StaticLLMPipeline, demo_model_path
from staticllm.errors import GenerationConfigError
from staticllm.pipelines.diagnostics.reference import EXACT

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
