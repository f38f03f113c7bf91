"""Tests that prompts, lower case and the order of modules are those of the files of sentence-transformers."""

import json
import shutil

import numpy as np
import pytest
from encoder_models import encoder_directory

from staticllm import StaticEmbeddingPipeline
from staticllm.errors import ModelError
from staticllm.pipelines.embedding.encoder_files import read_encoder_files
from staticllm.pipelines.embedding.text_tokenizer import lower_case

F32 = {"INFERENCE_PRECISION_HINT": "f32"}


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
