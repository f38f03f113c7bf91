"""Tests that every mistake is a one-line error with a remedy, and that the pipeline stays usable."""

from __future__ import annotations

import shutil
import threading

import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest
from openvino import opset13 as ops
from support.helpers import assert_nothing_held, one_line

from staticllm import (
    ConfigError,
    DeviceError,
    GenerationConfigError,
    ModelError,
    PromptError,
    PromptTooLongError,
    StaticLLMConfig,
    StaticLLMPipeline,
    UnsupportedModelError,
)
from staticllm.errors import quoted

pytestmark = pytest.mark.usefixtures("shared_programs")

GREEDY = {"max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def pipe(zoo):
    return StaticLLMPipeline(
        zoo / "llama", "CPU", MAX_PROMPT_LEN=64, MIN_RESPONSE_LEN=32, INFERENCE_PRECISION_HINT="f32"
    )


@pytest.fixture(autouse=True)
def stays_usable(request):
    """Check after each test that the pipeline still gives the same answer and has lost no slot."""
    if "pipe" not in request.fixturenames:
        yield
        return
    pipe, prompt = request.getfixturevalue("pipe"), np.array([5, 6, 7])
    before = pipe.generate(prompt, **GREEDY).tokens
    yield
    assert pipe.generate(prompt, **GREEDY).tokens == before
    assert_nothing_held(pipe)


@pytest.fixture
def copy_of(zoo, tmp_path):
    """A writable copy of a tiny model."""

    def make(name):
        shutil.copytree(zoo / name, tmp_path / name)
        for path in (tmp_path / name).iterdir():
            path.chmod(0o644)
        (tmp_path / name).chmod(0o755)
        return tmp_path / name

    return make


# -- model directories


def test_a_missing_directory_is_refused():
    with pytest.raises(ModelError) as error:
        StaticLLMPipeline("/no/such/model")
    assert "/no/such/model" in one_line(error)


@pytest.mark.parametrize("name", ["openvino_model.xml", "openvino_tokenizer.xml", "openvino_detokenizer.xml"])
def test_a_missing_file_is_named(copy_of, name):
    path = copy_of("llama")
    (path / name).unlink()
    with pytest.raises(ModelError) as error:
        StaticLLMPipeline(path)
    assert name in one_line(error)
    assert "staticllm export" in str(error.value) or "convert_tokenizer" in str(error.value)


@pytest.mark.parametrize("name", ["openvino_model.bin", "openvino_tokenizer.bin"])
def test_missing_weights_are_not_called_short(copy_of, name):
    weights = copy_of("llama") / name
    for what, change in (("is missing", weights.unlink), ("is no file", weights.mkdir)):
        change()
        with pytest.raises(ModelError) as error:
            StaticLLMPipeline(weights.parent)
        assert one_line(error).startswith(f"{quoted(weights)} {what}, {weights.with_suffix('.xml').name} needs ")
    weights = weights.with_name("other.bin")
    with pytest.raises(ModelError, match=r"other\.bin' is missing"):
        StaticLLMPipeline(weights.parent, WEIGHTS_PATH=str(weights))


@pytest.mark.parametrize("name", ["openvino_model.xml", "openvino_model.bin", "openvino_tokenizer.bin"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_file_is_refused(copy_of, name, share):
    path = copy_of("llama")
    data = (path / name).read_bytes()
    (path / name).write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelError) as error:
        StaticLLMPipeline(path)
    assert name.split(".")[0] in one_line(error)


def test_garbage_in_the_model_is_refused(copy_of):
    path = copy_of("llama")
    (path / "openvino_model.xml").write_text("this is not a model </net>")
    with pytest.raises(ModelError) as error:
        StaticLLMPipeline(path)
    assert "is damaged or truncated" in one_line(error)


def save(model, path):
    ov.save_model(model, path / "openvino_model.xml")
    return path


def test_a_model_without_state_is_refused(copy_of):
    path = copy_of("llama")
    ids = ops.parameter([-1, -1], ov.Type.i64, name="input_ids")
    ids.output(0).set_names({"input_ids"})
    logits = ops.convert(ops.unsqueeze(ids, ops.constant(2)), "f32")
    logits.output(0).set_names({"logits"})
    with pytest.raises(UnsupportedModelError) as error:
        StaticLLMPipeline(save(ov.Model([logits], [ids], "stateless"), path))
    assert "no ReadValue/Assign" in one_line(error)


def test_a_model_that_is_not_a_language_model_is_refused(copy_of):
    path = copy_of("llama")
    image = ops.parameter([1, 3, 8, 8], ov.Type.f32, name="image")
    image.output(0).set_names({"image"})
    with pytest.raises(ModelError) as error:
        StaticLLMPipeline(save(ov.Model([ops.relu(image)], [image], "vision"), path))
    assert "not a causal language model" in one_line(error)
    assert "image" in str(error.value)


def test_a_model_that_no_pass_can_lower_is_refused(zoo, copy_of):
    path = copy_of("llama")
    model = ov.Core().read_model(zoo / "llama" / "openvino_model.xml")
    (sink, *_) = model.get_sinks()
    sink.input(0).replace_source_output(ops.multiply(sink.input_value(0), np.float32(2)).output(0))
    with pytest.raises(UnsupportedModelError) as error:
        StaticLLMPipeline(save(model, path))
    assert "keep_new_rows" in one_line(error)
    assert "past_key_values" in str(error.value)


# -- devices and properties


def test_an_absent_device_is_refused(zoo):
    missing = "NPU" if "NPU" not in ov.Core().available_devices else "GPU.7"
    for device in (missing, "TOASTER", "", 5):
        with pytest.raises(DeviceError) as error:
            StaticLLMPipeline(zoo / "llama", device)
        assert "there are: CPU" in one_line(error)


@pytest.mark.parametrize(
    ("properties", "word"),
    [
        ({"MAX_PROMPT_LEN": -1}, "MAX_PROMPT_LEN=-1"),
        ({"MIN_RESPONSE_LEN": 0}, "MIN_RESPONSE_LEN=0"),
        ({"MAX_PROMPT_LEN": 12.5}, "12.5"),
        ({"max_prompt_len": 5}, "unknown property"),
        ({"INFERENCE_PRECISION": "f32"}, "did you mean 'INFERENCE_PRECISION_HINT'"),
        ({"GENERATE_CONFIG": {"NOPE": 1}}, "'NOPE'"),
        ({"INFERENCE_PRECISION_HINT": "f33"}, "refused"),
    ],
)  # fmt: skip
def test_bad_properties_are_refused(zoo, properties, word):
    with pytest.raises((ConfigError, DeviceError)) as error:
        StaticLLMPipeline(zoo / "llama", "CPU", **properties)
    assert word in one_line(error)


def test_a_device_given_twice_is_refused(zoo):
    with pytest.raises(ConfigError) as error:
        StaticLLMPipeline(zoo / "llama", "CPU", device="CPU")
    assert "given twice" in one_line(error)


def test_a_config_object_together_with_properties_is_refused(zoo):
    with pytest.raises(ConfigError) as error:
        StaticLLMPipeline(zoo / "llama", config=StaticLLMConfig(), MAX_PROMPT_LEN=5)
    assert "give one of them" in one_line(error)


# -- prompts


@pytest.mark.parametrize(
    ("inputs", "word"),
    [
        (np.array([], np.int64), "no tokens"),
        (np.array([[5, 1024]]), "1024 is outside the vocabulary: ids go from 0 to 1023"),
        (np.array([-1]), "-1 is outside"),
        (np.array([1.5]), "float64"),
        (np.zeros((0, 4), np.int64), "shape [0, 4]"),
        (np.zeros((1, 1, 4), np.int64), "shape [1, 1, 4]"),
        ([], "list of prompts is empty"),
        (5, "a int"),
        (None, "NoneType"),
        ([1, 2], "a list"),
        (genai.ChatHistory(), "history is empty"),
        ("a\ud800b", "half a character"),
        (genai.TokenizedInputs(ov.Tensor(np.array([[5, 6]])), ov.Tensor(np.array([[1]]))), "2 ids"),
    ],
)
def test_bad_prompts_are_refused(pipe, inputs, word):
    with pytest.raises(PromptError) as error:
        pipe.generate(inputs, max_new_tokens=3)
    assert word in one_line(error)


@pytest.mark.parametrize("inputs", ["", [""], ["a", "", "c"]])
def test_an_empty_text_without_a_template_is_refused(pipe, inputs):
    with pytest.raises(PromptError) as error:
        pipe.generate(inputs, max_new_tokens=3, apply_chat_template=False)
    assert "empty" in one_line(error)


def test_a_prompt_longer_than_max_prompt_len_is_refused(pipe):
    with pytest.raises(PromptTooLongError) as error:
        pipe.generate(np.full(65, 7), max_new_tokens=3)
    assert "65 tokens, MAX_PROMPT_LEN is 64" in one_line(error)
    assert "MAX_PROMPT_LEN=65" in str(error.value)
    assert (error.value.num_tokens, error.value.limit) == (65, 64)
    assert len(pipe.generate(np.full(64, 7), max_new_tokens=3, ignore_eos=True).tokens[0]) == 3


# -- generation options


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0: must be a whole number of 1 or more"),
        ({"max_new_tokens": -3}, "max_new_tokens=-3"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5"),
        ({"min_new_tokens": -1}, "min_new_tokens=-1"),
        ({"max_tokens": 5}, "unknown option 'max_tokens'"),
        ({"do_sample": "no"}, "do_sample='no': must be True or False"),
        ({"echo": "no"}, "echo='no': must be True or False"),
        ({"ignore_eos": 0.5}, "ignore_eos=0.5: must be True or False"),
        ({"include_stop_str_in_output": "no"}, "include_stop_str_in_output='no': must be True or False"),
        ({"apply_chat_template": []}, "apply_chat_template=[]: must be True or False"),
        ({"logprobs": -3}, "logprobs=-3"),
        ({"logprobs": "no"}, "logprobs='no'"),
        ({"do_sample": True, "temperature": 0}, "temperature=0"),
        ({"do_sample": True, "temperature": "hot"}, "temperature='hot'"),
        ({"do_sample": True, "top_p": 1.5}, "top_p=1.5"),
        ({"do_sample": True, "top_k": -1}, "top_k=-1"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
        ({"presence_penalty": 3}, "presence_penalty=3"),
        ({"num_beams": 4, "do_sample": True}, "do_sample=True with num_beams=4"),
        ({"num_beams": 2, "diversity_penalty": 0.5}, "diversity_penalty=0.5 with num_beam_groups=1"),
        ({"num_assistant_tokens": 3}, "num_assistant_tokens=3 without a draft model"),
        ({"assistant_confidence_threshold": 0.5}, "assistant_confidence_threshold=0.5 without a draft model"),
        ({"assistant_confidence_threshold": 2}, "assistant_confidence_threshold=2: must be a number from 0, up to 1"),
        ({"max_ngram_size": -1}, "max_ngram_size=-1"),
        ({"max_ngram_size": 3, "num_assistant_tokens": 2.5}, "num_assistant_tokens=2.5"),
        (
            {"max_ngram_size": 2, "num_return_sequences": 2, "do_sample": True},
            "max_ngram_size=2 with num_return_sequences=2: drafts are for single answers",
        ),
        (
            {"num_assistant_tokens": 2, "assistant_confidence_threshold": 0.5},
            "num_assistant_tokens=2 with assistant_confidence_threshold=0.5",
        ),
        ({"do_sample": True, "min_p": 1.0}, "min_p=1.0: must be a number from 0, less than 1"),
        ({"top_k": "a"}, "top_k='a'"),
        ({"stop_token_ids": 5}, "stop_token_ids=5: must be a set"),
        ({"min_new_tokens": 5, "max_new_tokens": 3}, "min_new_tokens=5 is more than max_new_tokens=3"),
        ({"generation_config": {5: 1}}, "unknown option 5"),
        ({"stop_strings": [""]}, "non-empty strings"),
        ({"max_length": 2}, "max_length=2 leaves no room after a prompt of 3"),
        ({"streamer": 5}, "streamer is a int"),
        ({"generation_config": 5}, "generation_config is a int"),
        ({"generation_config": {"top_q": 5}}, "unknown option 'top_q': did you mean 'top_"),
    ],
)
def test_bad_generation_options_are_refused(pipe, options, word):
    with pytest.raises(GenerationConfigError) as error:
        pipe.generate(np.array([5, 6, 7]), **options)
    assert word in one_line(error)


def test_a_bad_default_config_keeps_the_old_one(pipe):
    bad = genai.GenerationConfig()
    bad.num_beams, bad.num_beam_groups = 4, 3
    with pytest.raises(GenerationConfigError):
        pipe.set_generation_config(bad)
    assert pipe.get_generation_config().num_beams == 1


# -- streamers and threads


@pytest.mark.parametrize("moment", ["slots.extend"])
def test_an_exception_inside_a_commit_loses_no_slot(pipe, moment, monkeypatch):
    """The exception leaves slots allocated but not owned, or owned but not freed; the engine must repair this."""
    pipe.generate(np.arange(5, 40), max_new_tokens=3)
    part, _, method = moment.partition(".")
    owner, calls = getattr(pipe.engine.runner.cache, part), []
    original = getattr(owner, method)

    def failing(*arguments):
        calls.append(1)
        if method == "extend":
            original(*arguments)
        raise MemoryError("no memory left")

    monkeypatch.setattr(owner, method, failing)
    with pytest.raises(DeviceError, match="no memory left"):
        pipe.generate(np.arange(7, 40), max_new_tokens=3)
    monkeypatch.undo()
    assert calls


def test_a_failing_template_is_a_one_line_error(zoo):
    broken = StaticLLMPipeline(zoo / "llama", "CPU", MAX_PROMPT_LEN=32)
    broken.get_tokenizer().set_chat_template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(PromptError) as error:
        broken.generate("hello")
    assert "chat template" in one_line(error)


@pytest.mark.parametrize("path", [None, 5, object()])
def test_objects_that_are_not_paths_are_refused(path):
    with pytest.raises(ModelError) as error:
        StaticLLMPipeline(path)
    assert "must be the path" in one_line(error)


def test_two_threads_get_their_own_answers(pipe):
    prompts = [np.arange(3, 40), np.arange(500, 520)]
    alone = [pipe.generate(prompt, max_new_tokens=30, ignore_eos=True).tokens for prompt in prompts]
    answers = [[], []]

    def work(index):
        for _ in range(5):
            answers[index].append(pipe.generate(prompts[index], max_new_tokens=30, ignore_eos=True).tokens)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [[alone[0]] * 5, [alone[1]] * 5]
