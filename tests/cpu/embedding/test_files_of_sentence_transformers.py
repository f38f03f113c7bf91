"""Tests that prompts, lower case and the order of modules are those of the files of sentence-transformers."""

import json
import shutil
import struct

import numpy as np
import pytest
from support.encoders.encoder_models import WIDTH, encoder_directory

from staticllm import StaticEmbeddingPipeline
from staticllm.errors import ConfigError, ModelError
from staticllm.pipelines.embedding.encoder_files import read_encoder_files
from staticllm.pipelines.embedding.text_tokenizer import lower_case

pytestmark = pytest.mark.usefixtures("shared_lowering")

F32 = {"INFERENCE_PRECISION_HINT": "f32"}
TEXTS = ["a fox", "rain falls in the valley"]


@pytest.fixture
def directory(tmp_path):
    return encoder_directory(tmp_path)


def write(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize(
    ("prompts", "default", "expected"),
    [
        ({"query": "q: ", "document": "d: "}, None, ("q: ", "d: ", "")),
        ({"query": "q: ", "document": "", "passage": "p: "}, "query", ("q: ", "p: ", "q: ")),
        ({"corpus": "c: ", "passage": "p: "}, "corpus", ("", "p: ", "c: ")),
        ({"corpus": "c: "}, "corpus", ("", "c: ", "c: ")),
        ({"other": "o: "}, "other", ("", "", "o: ")),
        ({}, "document", ("", "", "")),
        (None, None, ("", "", "")),
    ],
)
def test_each_call_has_its_prompt(directory, prompts, default, expected):
    write(directory / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": default})
    query, document, other = expected
    with StaticEmbeddingPipeline(directory, "CPU", **F32) as pipe:
        assert (pipe.prompts["query"], pipe.prompts["document"]) == (query, document)
        for found, prompt in (
            (pipe.embed_query("a fox"), query),
            (pipe.embed_documents(["a fox"])[0], document),
            (pipe.embed(["a fox"])[0], other),
            (pipe.encode(["a fox"])[0], other),
            (pipe.encode(["a fox"], prompt_name="query")[0], query),
            (pipe.encode(["a fox"], prompt_name=default)[0], other),
            (pipe.encode(["a fox"], prompt="p: ", prompt_name="query")[0], "p: "),
            (pipe.submit("a fox").result(60), other),
            (pipe.submit_texts(["a fox"]).result(60)[0], other),
        ):
            np.testing.assert_allclose(found, pipe.encode([prompt + "a fox"], prompt="")[0], atol=1e-6)


def test_texts_and_prompts_are_made_lower_case_if_the_files_say_so(directory):
    write(directory / "config_sentence_transformers.json", {"prompts": {"query": "QUERY: "}})
    text = "Tell Me About A FOX."
    with StaticEmbeddingPipeline(directory, "CPU", **F32) as pipe:
        expected, as_given = pipe.encode(["query: " + text.lower()])[0], pipe.embed_query(text)
    assert np.abs(expected - as_given).max() > 1e-3
    write(directory / "sentence_bert_config.json", {"max_seq_length": 64, "do_lower_case": True})
    with StaticEmbeddingPipeline(directory, "CPU", **F32) as pipe:
        np.testing.assert_allclose(pipe.embed_query(text), expected, atol=1e-6)


def test_lower_case_is_that_of_each_character():
    assert lower_case("ΟΔΟΣ İ") == "οδοσ i\u0307"


TRANSFORMER, POOLING = {"type": "a.b.Transformer", "path": ""}, {"type": "a.Pooling", "path": "1_Pooling"}
NORMALIZE, DROPOUT = {"type": "x.Normalize", "path": "2_Normalize"}, {"type": "x.Dropout", "path": "3_Dropout"}


@pytest.mark.parametrize(
    "modules", [[POOLING, TRANSFORMER], [TRANSFORMER, NORMALIZE, POOLING], [TRANSFORMER, POOLING] * 2]
)
def test_modules_in_an_order_that_computes_something_else_are_refused(directory, modules):
    write(directory / "modules.json", modules)
    with pytest.raises(
        ModelError, match=r"modules\.json: the modules .*: only this order is supported: Transformer, Pooling"
    ):
        StaticEmbeddingPipeline(directory, "CPU")


@pytest.mark.parametrize("modules", [[TRANSFORMER, POOLING], [TRANSFORMER, DROPOUT, POOLING, DROPOUT, NORMALIZE]])
def test_modules_in_their_order_are_read(directory, tmp_path_factory, modules):
    copied = tmp_path_factory.mktemp("modules") / "model"
    shutil.copytree(directory, copied)
    write(copied / "modules.json", modules)
    found = read_encoder_files(copied)
    assert (found.pooling, found.is_normalised) == ("mean", NORMALIZE in modules)


@pytest.mark.parametrize("name", ["modules.json", "1_Pooling/config.json", "sentence_bert_config.json"])
@pytest.mark.parametrize("kind", ["folder", "link to nothing"])
def test_what_cannot_be_read_is_not_taken_for_missing(directory, name, kind):
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("nothing")
    with pytest.raises(ModelError, match=f"{path.name}: cannot be read: [^\n]*$"):
        read_encoder_files(directory)


NO_LIMIT = 10**30


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"model_max_length": 16}}, 16),
        ({"tokenizer_config.json": {"model_max_length": 16}, "config.json": {"max_position_embeddings": 12}}, 12),
        ({"tokenizer_config.json": {"model_max_length": NO_LIMIT}}, None),
        ({"tokenizer_config.json": {"model_max_length": 16}, "sentence_bert_config.json": {"max_seq_length": 24}}, 24),
        (
            {"tokenizer_config.json": {"model_max_length": 16}, "sentence_bert_config.json": {"max_seq_length": None}},
            16,
        ),
        ({"sentence_xlm-roberta_config.json": {"max_seq_length": 40}}, 40),
    ],
)
def test_the_longest_text_is_that_of_whichever_file_has_it(tmp_path, files, expected):
    write(tmp_path / "modules.json", [TRANSFORMER])
    for name, content in files.items():
        write(tmp_path / name, content)
    assert read_encoder_files(tmp_path).max_length == expected


def test_the_tokenizer_of_an_export_without_modules_says_nothing(tmp_path):
    write(tmp_path / "tokenizer_config.json", {"model_max_length": 16})
    assert read_encoder_files(tmp_path).max_length is None


DENSE = {"type": "x.Dense", "path": "2_Dense"}


def with_dense(directory, config, tensors):
    """Add a Dense module; ``tensors`` are in f32, f16, or bf16 as uint16."""
    write(directory / "modules.json", [TRANSFORMER, POOLING, DENSE])
    write(directory / "2_Dense" / "config.json", config)
    types = {"float32": "F32", "float16": "F16", "uint16": "BF16"}
    header, body = {}, b""
    for name, array in tensors.items():
        ends = [len(body), len(body) + array.nbytes]
        header[name] = {"dtype": types[str(array.dtype)], "shape": array.shape, "data_offsets": ends}
        body += array.tobytes()
    text = json.dumps(header).encode()
    (directory / "2_Dense" / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)


def normalised(vectors):
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    """The vectors of ``TEXTS`` before any Dense module, not normalised."""
    directory = encoder_directory(tmp_path_factory.mktemp("plain"))
    with StaticEmbeddingPipeline(directory, "CPU", normalize=False, **F32) as pipe:
        return pipe.encode(TEXTS)


@pytest.mark.parametrize(
    ("width", "has_residual", "dtype"),
    [
        *((width, has_residual, "f32") for width in (WIDTH, 8) for has_residual in (True, False)),
        (8, True, "f16"),
        (8, True, "bf16"),
    ],
)
def test_a_dense_module_is_that_of_sentence_transformers(directory, vectors, width, has_residual, dtype):
    random = np.random.default_rng(0)
    exact = {
        "linear.weight": random.normal(size=(width, WIDTH)).astype(np.float32),
        "linear.bias": random.normal(size=width).astype(np.float32),
        "residual.weight": random.normal(size=(width, WIDTH)).astype(np.float32),
    }
    if dtype == "f16":
        stored = {name: array.astype(np.float16) for name, array in exact.items()}
        exact = {name: array.astype(np.float32) for name, array in stored.items()}
    elif dtype == "bf16":
        stored = {name: (array.view(np.uint32) >> 16).astype(np.uint16) for name, array in exact.items()}
        exact = {name: (array.astype(np.uint32) << 16).view(np.float32) for name, array in stored.items()}
    else:
        stored = exact
    if not has_residual or width == WIDTH:
        stored = {name: array for name, array in stored.items() if name != "residual.weight"}
    with_dense(
        directory, {"activation_function": "torch.nn.modules.activation.Tanh", "use_residual": has_residual}, stored
    )
    expected = np.tanh(vectors @ exact["linear.weight"].T + exact["linear.bias"])
    if has_residual:
        expected = expected + (vectors if width == WIDTH else vectors @ exact["residual.weight"].T)
    with StaticEmbeddingPipeline(directory, "CPU", **F32) as pipe:
        np.testing.assert_allclose(pipe.encode(TEXTS), normalised(expected), atol=2e-6)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"module_input_name": "token_embeddings"},
            "module_input_name is 'token_embeddings': only a Dense of the embedding",
        ),
        ({"use_residual": True}, r"has no tensor residual\.weight, which use_residual needs between two widths"),
        ({"activation_function": "torch.nn.modules.activation.Softplus"}, "the activation 'softplus' is not one of"),
    ],
)
def test_a_dense_module_that_computes_something_else_is_refused(directory, config, message):
    with_dense(directory, config, {"linear.weight": np.ones((8, WIDTH), np.float32)})
    with pytest.raises(ModelError, match=message):
        StaticEmbeddingPipeline(directory, "CPU")


def test_scores_of_two_tokens_are_read(tmp_path):
    write(tmp_path / "modules.json", [TRANSFORMER, {"type": "x.LogitScore", "path": "1_LogitScore"}])
    config = tmp_path / "1_LogitScore" / "config.json"
    write(config, {"true_token_id": 7, "false_token_id": 9})
    assert read_encoder_files(tmp_path).score_tokens == (9, 7)
    for wrong in ({"true_token_id": 7, "false_token_id": None}, {"true_token_id": -1, "false_token_id": 9}, {}):
        write(config, wrong)
        with pytest.raises(ModelError, match="only scores of two tokens are supported"):
            read_encoder_files(tmp_path)


def test_properties_of_the_only_device_count(directory):
    coarse = {"INFERENCE_PRECISION_HINT": "bf16"}
    with StaticEmbeddingPipeline(directory, "CPU", **F32) as pipe:
        expected = pipe.encode(TEXTS)
    with StaticEmbeddingPipeline(directory, "cpu", DEVICE_PROPERTIES={"CPU": F32}, **coarse) as pipe:
        np.testing.assert_allclose(pipe.encode(TEXTS), expected, atol=1e-6)
    with pytest.raises(ConfigError, match="DEVICE_PROPERTIES for 'TPU': there is no such device here; there are: CPU"):
        StaticEmbeddingPipeline(directory, "CPU", DEVICE_PROPERTIES={"TPU": F32})
    assert StaticEmbeddingPipeline(directory, "CPU", DEVICE_PROPERTIES={"GPU": F32}).encode(TEXTS[:1]).size
    with pytest.raises(ConfigError, match="device is a NoneType: must be the name of a device"):
        StaticEmbeddingPipeline(directory, None)
