"""Tests the embedding pipeline against the original model, one text per call in f32, and GenAI's class as far as it is right."""

import asyncio
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openvino_genai as genai
import pytest
from support.encoders.encoder_models import Alone, encoder_directory, write

from staticllm.core import ProgressEvent
from staticllm.devices import get_core
from staticllm.errors import ConfigError, ModelError, PromptError
from staticllm.pipelines.embedding.embedding_request import EmbeddingRequest
from staticllm.pipelines.text_embedding_pipeline import StaticEmbeddingPipeline

pytestmark = pytest.mark.usefixtures("shared_lowering")

F32 = {"INFERENCE_PRECISION_HINT": "f32"}
TEXTS = ["a", "What is an NPU?", "Tell me a story about a fox. " * 6, "", "the", "Ein Satz mit Umlauten: äöü."]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """An encoder with the demo model's tokenizer, and pooling and prompts in the files of sentence-transformers."""
    return encoder_directory(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def pipe(directory):
    with StaticEmbeddingPipeline(directory, "CPU", **F32) as found:
        yield found


@pytest.fixture(scope="module")
def alone(directory):
    program = Alone(get_core().read_model(directory / "openvino_model.xml"))
    tokenizer = genai.Tokenizer(directory)

    def embed(text, pooling="mean"):
        return program(tokenizer.encode(text).input_ids.data[0], pooling)

    return embed


def some_texts(count):
    rng = np.random.default_rng(count)
    words = ("the", "fox", "asks", "what", "a", "device", "is", "and", "why", "it", "only", "runs", "graphs", "of")
    return [" ".join(rng.choice(words, rng.integers(1, 25))) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 60])
def test_packed_texts_have_the_vectors_of_each_text_alone(pipe, alone, count):
    texts = some_texts(count)
    found = pipe.embed_documents(texts, as_array=True)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [alone(text) for text in texts], atol=1e-6, rtol=0)


def test_queries_get_the_models_prompt_and_documents_do_not(pipe, alone):
    assert np.abs(np.array(pipe.embed_query("a fox")) - alone("query: a fox")).max() < 1e-6
    assert np.abs(np.array(pipe.embed(["a fox"], "so: ")[0]) - alone("so: a fox")).max() < 1e-6
    assert np.abs(np.array(pipe.embed_documents(["a fox"])[0]) - alone("a fox")).max() < 1e-6


@pytest.mark.parametrize(("kind", "pooling"), [("CLS", "first"), ("LAST_TOKEN", "last")])
def test_a_given_pooling_is_used(directory, alone, kind, pooling):
    chosen = getattr(StaticEmbeddingPipeline.PoolingType, kind)
    with StaticEmbeddingPipeline(directory, "CPU", pooling_type=chosen, **F32) as pipe:
        assert np.abs(np.array(pipe.embed_documents(["a fox runs"])[0]) - alone("a fox runs", pooling)).max() < 1e-6


def test_genai_computes_the_same_with_the_same_config(directory):
    config = genai.TextEmbeddingPipeline.Config(pooling_type=StaticEmbeddingPipeline.PoolingType.MEAN)
    texts = some_texts(5)
    peer = genai.TextEmbeddingPipeline(directory, "CPU", config, **F32)
    with StaticEmbeddingPipeline(directory, "CPU", config, **F32) as pipe:
        np.testing.assert_allclose(pipe.embed_documents(texts), peer.embed_documents(texts), atol=1e-6, rtol=0)


def test_genais_default_pooling_does_not_replace_the_models_own(directory, alone):
    with (
        pytest.warns(UserWarning, match="the model's own pooling is used"),
        StaticEmbeddingPipeline(directory, "CPU", genai.TextEmbeddingPipeline.Config(), **F32) as pipe,
    ):
        assert np.abs(np.array(pipe.embed_documents(["a fox"])[0]) - alone("a fox")).max() < 1e-6


def test_leading_dimensions_are_normalised_again(pipe):
    whole, cut = pipe.encode(TEXTS[:2]), pipe.encode(TEXTS[:2], dimensions=8)
    assert cut.shape == (2, 8)
    np.testing.assert_allclose(np.linalg.norm(cut, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(cut / cut[:, :1], whole[:, :8] / whole[:, :1], rtol=1e-4)
    with pytest.raises(ConfigError, match="dimensions=33: must be a whole number from 1 to 32"):
        pipe.encode(TEXTS[:1], dimensions=33)


@pytest.mark.filterwarnings("ignore:the ranges of int8")
def test_output_types_convert_the_vectors(pipe):
    vectors = pipe.encode(TEXTS, dimensions=20)
    bits = pipe.encode(TEXTS, dimensions=20, output_type="ubinary")
    np.testing.assert_array_equal(np.unpackbits(bits, axis=1)[:, :20], vectors > 0)
    ranges = np.stack((vectors.min(axis=0), vectors.max(axis=0)))
    steps = pipe.encode(TEXTS, dimensions=20, output_type="uint8")
    assert np.abs(ranges[0] + (steps + 0.5) * (ranges[1] - ranges[0]) / 255 - vectors).max() < 0.01
    for given in (ranges, ranges.tolist()):
        same = pipe.encode(TEXTS, dimensions=20, output_type="uint8", calibration=given)
        assert np.abs(steps.astype(int) - same).max() <= 1, "another call may have another shape, and other last digits"
    with pytest.raises(ConfigError, match=r"calibration has the shape \[2, 20\]: must be \[n, 32\]"):
        pipe.encode(TEXTS, output_type="int8", calibration=ranges)
    assert pipe.encode([], dimensions=20, output_type="binary").shape == (0, 3)


def test_prompts_are_those_of_the_files_and_of_the_config(directory, pipe):
    assert pipe.prompts == {"query": "query: ", "document": ""}
    for name in ("passage", 3, ["query"]):
        with pytest.raises(ConfigError, match=r"prompt_name=.*: must be one of query, document, or None") as caught:
            pipe.encode(["a"], prompt_name=name)
        assert "\n" not in str(caught.value)
        with pytest.raises(ConfigError, match="prompt_name="):
            pipe.encode(["a"], prompt="p: ", prompt_name=name)
    with StaticEmbeddingPipeline(directory, "CPU", query_instruction="find: ", **F32) as other:
        assert other.prompts["query"] == "find: "


def test_many_threads_and_handles_get_their_own_vectors(pipe, alone):
    texts = some_texts(24)
    expected = [alone(text) for text in texts]
    with ThreadPoolExecutor(24) as pool:
        found = list(pool.map(lambda text: pipe.embed_documents([text])[0], texts))
    np.testing.assert_allclose(found, expected, atol=1e-6, rtol=0)
    handles = [pipe.submit(text) for text in texts]
    np.testing.assert_allclose([handle.result(30) for handle in handles], expected, atol=1e-6, rtol=0)

    async def together():
        return await asyncio.gather(*(asyncio.wrap_future(pipe.submit(text).future) for text in texts))

    np.testing.assert_allclose(np.concatenate(asyncio.run(together())), expected, atol=1e-6, rtol=0)


def test_texts_can_be_begun_and_waited_for(pipe):
    pipe.start_embed_documents_async(TEXTS)
    pipe.start_embed_query_async("a fox")
    np.testing.assert_allclose(pipe.wait_embed_query(), pipe.embed_query("a fox"), atol=1e-6)
    np.testing.assert_allclose(pipe.wait_embed_documents(), pipe.embed_documents(TEXTS), atol=1e-6)
    with pytest.raises(ConfigError, match="start_embed_query_async"):
        pipe.wait_embed_query()


def test_texts_that_were_begun_can_be_waited_for_again_after_ctrl_c(pipe, monkeypatch):
    def interrupted(self, on_progress=None):
        raise KeyboardInterrupt

    pipe.start_embed_documents_async(TEXTS)
    with monkeypatch.context() as patch:
        patch.setattr(EmbeddingRequest, "collect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pipe.wait_embed_documents()
    np.testing.assert_allclose(pipe.wait_embed_documents(), pipe.embed_documents(TEXTS), atol=1e-6)
    with pytest.raises(ConfigError, match="start_embed_documents_async"):
        pipe.wait_embed_documents()


def test_progress_is_told_on_the_callers_thread_and_its_error_ends_the_call(pipe):
    told, texts = [], some_texts(200)
    pipe.encode(texts, on_progress=lambda done, total: told.append((done, total, threading.get_ident())))
    assert told[-1][:2] == (200, 200)
    assert {ident for _, _, ident in told} == {threading.get_ident()}

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipe.encode(texts, on_progress=stop)
    assert pipe.embed_documents(["still there"])


def test_long_texts_are_truncated_or_refused(directory, pipe):
    long = "fox " * 1000
    assert np.isfinite(pipe.embed_documents([long, "short"])).all()
    with (
        StaticEmbeddingPipeline(directory, "CPU", overflow="refuse", max_length=64) as strict,
        pytest.raises(PromptError, match=r"text 1 has \d+ tokens, the limit is 64"),
    ):
        strict.embed_documents(["short", long])


@pytest.mark.parametrize(
    ("texts", "message"),
    [([3], "text 0 is a int"), (["a", "\ud800"], "text 1 is not valid text"), ("one", "texts is a str")],
)
def test_bad_texts_are_refused_in_one_line(pipe, texts, message):
    with pytest.raises((PromptError, ConfigError), match=message) as error:
        pipe.embed_documents(texts)
    assert "\n" not in str(error.value)
    assert pipe.embed_documents([]) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deadline_ms": 10**400}, "deadline_ms=a whole number of 1329 bits: must be a number of milliseconds"),
        ({"deadline_ms": 10**5000}, "deadline_ms=a whole number of 16610 bits"),
        ({"deadline_ms": float("nan")}, "deadline_ms=nan"),
        ({"prompt": 3}, "the prompt is a int: must be a str"),
        ({"prompt": b"x"}, "the prompt is a bytes"),
        ({"prompt": 0}, "the prompt is a int"),
        ({"prompt": "\ud800"}, "the prompt is not valid text"),
        ({"on_progress": 3}, "on_progress=3: must be a function of two numbers of texts"),
        (
            {"output_type": "int8", "calibration": [[1.0], [1.0, 2.0]]},
            "calibration is a list of which numpy makes no array",
        ),
    ],
)
def test_bad_options_of_a_call_are_refused_in_one_line(pipe, options, message):
    with pytest.raises((PromptError, ConfigError), match=message) as error:
        pipe.encode(["a"], **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("prompt", [b"x", b"", 0, 3])
def test_a_prompt_that_is_no_text_is_refused_in_one_line(pipe, prompt):
    for call in (pipe.embed, lambda texts, prompt: pipe.submit(texts[0], prompt=prompt)):
        with pytest.raises(PromptError, match=rf"^the prompt is a {type(prompt).__name__}: must be a str$"):
            call(["a"], prompt)


def test_a_deadline_in_a_million_years_changes_nothing(pipe):
    np.testing.assert_allclose(pipe.encode(["a fox"], deadline_ms=3e16), pipe.encode(["a fox"]), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling pooling_mode_max_tokens"),
        ("1_Pooling/config.json", {"pooling_mode": {"a": 1}}, r"pooling \{'a': 1\}: must be one of cls"),
        ("1_Pooling/config.json", {"pooling_mode": [["cls"]]}, r"pooling \['cls'\]: must be one of cls"),
        ("modules.json", [{"type": "x.Pooling", "path": "a\0b"}], "path 'a\\\\x00b' cannot be a folder: .*null"),
        ("modules.json", [{"type": "x.Pooling", "path": "\ud800"}], "cannot be a folder: .*surrogates"),
        ("modules.json", [{"type": "x.Pooling", "path": "a" * 5000}], "cannot be a folder: .*too long"),
        ("1_Pooling/config.json", [], "must hold a JSON object"),
        ("modules.json", [{"type": "x.Pooling", "path": "../.."}], "leaves the model directory"),
        ("modules.json", [{"type": "x.Router", "path": ""}], "a module 'Router' is not supported"),
        ("sentence_bert_config.json", {"max_seq_length": "many"}, "max_seq_length is 'many'"),
        ("config_sentence_transformers.json", {"prompts": 3}, "prompts must map names to texts"),
        (
            "config_sentence_transformers.json",
            {"prompts": {"a": ""}, "default_prompt_name": "b"},
            "'b' is none of .* .a.$",
        ),
        ("sentence_bert_config.json", {"do_lower_case": "yes"}, "do_lower_case is 'yes': must be true or false"),
    ],
)
def test_wrong_files_are_refused_in_one_line(directory, tmp_path, name, content, message):
    copied = tmp_path / "model"
    shutil.copytree(directory, copied)
    write(copied / name, content)
    with pytest.raises(ModelError, match=message) as error:
        StaticEmbeddingPipeline(copied, "CPU")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 0}, "max_length=0: must be a whole number from 1"),
        ({"max_length": True}, "max_length=True"),
        ({"pooling_type": "mean"}, "must be a PoolingType"),
        ({"normalize": "no"}, "normalize='no': must be True or False"),
        ({"query_instruction": 3}, "query_instruction=3: must be a str"),
        ({"embed_instruction": b"x"}, "embed_instruction=b'x': must be a str"),
        ({"overflow": "wrap"}, "overflow='wrap'"),
        ({"config": 3}, "config is a int"),
    ],
)
def test_wrong_options_are_refused_in_one_line(directory, options, message):
    with pytest.raises(ConfigError, match=message):
        StaticEmbeddingPipeline(directory, "CPU", **options)


def test_a_pool_tells_the_parts_of_loading_as_one_device_does(directory):
    told = {}
    for name, options in (("alone", {}), ("pool", {"LATENCY_MS": 1000})):
        events = told[name] = []
        StaticEmbeddingPipeline(directory, "CPU", on_progress=events.append, **options).close()
    stages = {name: [event.stage for event in events] for name, events in told.items()}
    assert stages["pool"] == stages["alone"] and stages["pool"].count("ready") == 1
    assert all(isinstance(event, ProgressEvent) for event in told["pool"])


def test_closing_ends_the_thread(directory):
    pipe = StaticEmbeddingPipeline(directory, "CPU")
    pipe.embed_query("a")
    thread = pipe.shared_engine.thread
    pipe.close()
    pipe.close()
    assert not thread.is_alive()


def test_texts_longer_than_any_mask_are_refused_before_the_model_is_read(directory):
    with pytest.raises(ConfigError, match="max_length=100000: must be at most 8192"):
        StaticEmbeddingPipeline(directory, "CPU", max_length=100_000)
