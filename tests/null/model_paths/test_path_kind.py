"""Tests that one function says what a path holds, with the one command that helps, and that arguments are told from text."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from staticllm.errors import quoted
from staticllm.model_paths.arguments import is_path
from staticllm.model_paths.path_kind import path_kind

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"
IR = '<?xml version="1.0"?>\n<net name="x">'
CASES = {
    "several gguf": ({"chat.Q4_1.gguf": "GGUF", "chat.Q8_0.gguf": "GGUF"}, "several", "give one of the files: chat.Q4_1.gguf, "),
    "safetensors": (
        {"config.json": "{}", "model.safetensors": ""}, "hugging face", "export it: staticllm export @ held_openvino",
    ),
    "pickled": ({"config.json": "{}", "pytorch_model.bin": ""}, "hugging face", "staticllm export @"),
    "shards": (
        {"config.json": "{}", "model-00001-of-00002.safetensors": "", "model-00002-of-00002.safetensors": ""},
        "hugging face", "staticllm export @",
    ),
    "embedder": (
        {"config.json": "{}", "model.safetensors": "", "modules.json": "[]"}, "hugging face", "staticllm export @",
    ),
    "safetensors and gguf": (
        {"config.json": "{}", "model.safetensors": "", "a.gguf": ""}, "hugging face", "staticllm export @",
    ),
    "images of hugging face": (
        {"config.json": '{"vision_config": {}}', "model.safetensors": ""}, "hugging face", "VLMPipeline",
    ),
    "images": ({"openvino_language_model.xml": IR}, "images", "VLMPipeline"),
    "images with token ids": (
        {"openvino_language_model.xml": IR + '<layer name="input_ids">'}, "images", "rename openvino_language_model.xml",
    ),
    "speech": (
        {"openvino_encoder_model.xml": IR, "openvino_decoder_model.xml": IR, "preprocessor_config.json": "{}"},
        "speech", "WhisperPipeline",
    ),
    "translation": ({"openvino_encoder_model.xml": IR, "openvino_decoder_with_past_model.xml": IR}, "translation", "Seq2Seq"),
    "drawing": ({"model_index.json": "{}"}, "drawing", "Text2ImagePipeline"),
    "adapter": ({"adapter_config.json": "{}", "adapter_model.safetensors": ""}, "adapter", "give the model"),
    "pickled adapter": ({"adapter_config.json": "{}", "adapter_model.bin": ""}, "adapter as pickle", "save it as safetensors"),
    "ctranslate2": ({"model.bin": "", "vocabulary.txt": "", "config.json": "{}"}, "ctranslate2", "ORIGINAL"),
    "onnx": ({"model.onnx": ""}, "onnx", "ORIGINAL"),
    "onnx in its folder": ({"onnx/model.onnx": "", "config.json": "{}"}, "onnx", "ORIGINAL"),
    "tokenizer": ({"openvino_tokenizer.xml": IR}, "tokenizer", "staticllm export ORIGINAL"),
    "another name": ({"model.xml": IR, "model.bin": ""}, "other openvino", "rename it"),
    "blob set": ({"manifest.json": "{}", "a.blob": ""}, "blob set", "-p BLOB_PATH=@"),
    "cache": ({"key/manifest.json": "{}", "key/a.blob": ""}, "cache", "-p CACHE_DIR=@"),
    "openvino's cache": ({"1234.blob": ""}, "cache", "-p CACHE_DIR=@"),
    "archive": ({"model.zip": ""}, "archive", "unpack it"),
    "pointers of git-lfs": ({"openvino_model.xml": IR, "openvino_model.bin": LFS}, "git-lfs", "git -C @ lfs pull"),
    "pointers of weights": ({"config.json": "{}", "model.safetensors": LFS}, "git-lfs", "git -C @ lfs pull"),
    "several": ({"a/openvino_model.xml": IR, "b/openvino_model.xml": IR}, "several", "give one of them: @/a, @/b"),
    "hub cache": (
        {"models--a--b/snapshots/1/config.json": "{}", "models--a--b/snapshots/1/model.safetensors": ""},
        "subfolder", "give @/models--a--b/snapshots/1",
    ),
    "empty": ({}, "empty", "export a model into it"),
    "only hidden files": ({".git/config": ""}, "empty", "export a model into it"),
    "something else": ({"notes.txt": ""}, "nothing", "the folder that holds openvino_model.xml"),
    "no tokenizer": ({"openvino_model.xml": IR}, "no tokenizer", "staticllm export ORIGINAL"),
    "tokenizer to convert": ({"openvino_model.xml": IR, "tokenizer.json": "{}"}, "no tokenizer", "convert_tokenizer @"),
}  # fmt: skip


def written(folder, files):
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_folder_is_one_kind_with_one_remedy(name, tmp_path):
    files, kind, words = CASES[name]
    folder = written(tmp_path / "held", files)
    found = path_kind(folder, needs_tokenizer=True)
    assert found.kind.name == kind
    if "@/" in words:
        words = words.replace("/", os.sep)
    assert words.replace("@", str(folder)) in found.problem
    assert found.problem.startswith(quoted(folder))
    assert not found.is_loadable
    assert "\n" not in found.problem
    assert not re.search(r"[{}]", found.problem), "every blank is filled"


HEADS = {
    "SomeForCausalLM": ({}, "--task text-generation-with-past "),
    "SomeLMHeadModel": ({}, "--task text-generation-with-past "),
    "SomeForMaskedLM": ({}, "--task feature-extraction "),
    "SomeForPreTraining": ({}, "--task feature-extraction "),
    "SomeModel": ({"vocab_size": 9}, "--task feature-extraction "),
    "OtherModel": ({"vocab_size": 9, "auto_map": {"AutoModelForCausalLM": "code.Chat"}}, "--task text-generation-with-past "),
    "SomeEncoderModel": ({"is_encoder_decoder": True, "vocab_size": 9}, "--task feature-extraction "),
    "SomeForSequenceClassification": ({}, "--task text-classification "),
    "SomeForConditionalGeneration": ({"is_encoder_decoder": True}, "OVModelForSeq2SeqLM"),
    "SomeMTModel": ({"is_encoder_decoder": True, "vocab_size": 9}, "--task text2text-generation-with-past "),
    "TextAndImageModel": ({"vision_config": {}, "text_config": {}}, "no language model, embedder or reranker"),
    "ImageModel": ({"image_size": 224}, "no language model, embedder or reranker"),
    "SoundForCTC": ({"vocab_size": 32}, "no language model, embedder or reranker"),
    "ChatForConditionalGeneration": ({"vision_config": {}}, "VLMPipeline"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_the_task_of_an_export_is_that_of_the_head(name, tmp_path):
    fields, words = HEADS[name]
    files = {"config.json": json.dumps({"architectures": [name], **fields}), "model.safetensors": ""}
    found = path_kind(written(tmp_path / "held", files))
    assert found.kind.name == "hugging face"
    assert words in f"--task {found.task} {found.problem}"


def test_files_of_sentence_transformers_tell_an_embedder_whatever_its_head_is(tmp_path):
    config = json.dumps({"architectures": ["SomeForCausalLM"]})
    files = {"config.json": config, "model.safetensors": "", "1_Pooling/config.json": "{}"}
    assert path_kind(written(tmp_path / "held", files)).task == "feature-extraction"


@pytest.mark.parametrize("architectures", ["x", [], [1], {}, [None]])
def test_damaged_architectures_are_no_error(architectures, tmp_path):
    files = {"config.json": json.dumps({"architectures": architectures}), "model.safetensors": ""}
    assert path_kind(written(tmp_path / "held", files)).kind.name == "hugging face"


def test_an_openvino_model_is_loadable_by_its_folder_and_by_its_graph(tmp_path):
    files = dict.fromkeys(
        ("openvino_model.xml", "openvino_model.bin", "openvino_tokenizer.xml", "openvino_detokenizer.xml", "a.txt"), IR
    )
    folder = written(tmp_path / "held", files)
    for path in (folder, folder / "openvino_model.xml", folder / "openvino_model.bin"):
        found = path_kind(path, needs_tokenizer=True)
        assert found.is_loadable
        assert found.directory == folder
    assert not path_kind(folder / "a.txt").is_loadable


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("model.onnx", b"\x08", "onnx"),
        ("model.zip", b"PK", "archive"),
        ("model.tar.gz", b"", "archive"),
        ("7f.blob", b"", "blob"),
        ("model.safetensors", LFS.encode(), "git-lfs"),
        ("notes.txt", b"hi", "file"),
    ],
)
def test_a_file_is_a_kind_too(name, data, kind, tmp_path):
    (tmp_path / name).write_bytes(data)
    found = path_kind(tmp_path / name)
    assert found.kind.name == kind
    assert found.remedy


@pytest.mark.parametrize("name", ["chat.Q4_1.gguf", "renamed.bin"])
def test_a_gguf_file_is_a_model(name, tmp_path):
    folder = written(tmp_path / "held", {name: "GGUF\3"})
    found = path_kind(folder / name)
    assert found.is_loadable
    assert found.is_converted
    assert found.directory == folder / name
    assert found.name == Path(name).stem


def test_a_folder_with_one_gguf_file_stands_for_it(tmp_path):
    folder = written(tmp_path / "held", {"chat.gguf": "GGUF", "README.md": ""})
    assert path_kind(folder).directory == folder / "chat.gguf"
    parts = written(tmp_path / "parts", {"chat-00001-of-00002.gguf": "", "chat-00002-of-00002.gguf": ""})
    assert path_kind(parts).directory == parts / "chat-00001-of-00002.gguf"


def test_weights_stand_for_the_folder_of_their_model(tmp_path):
    folder = written(tmp_path / "held", {"config.json": "{}", "model.safetensors": ""})
    assert path_kind(folder / "model.safetensors") == path_kind(folder)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/no/such/model", "check the path"),
        ("owner/model-1.5B", "staticllm pull owner/model-1.5B"),
    ],
)
def test_a_missing_path_may_be_a_name_of_the_hub(path, words):
    assert words in path_kind(path).problem
    assert f"no model directory at {path!r}" in path_kind(path).problem


@pytest.mark.parametrize(
    "path", ["models/chat.gguf", "chat.gguf", "a/openvino_model.xml", "a/b.safetensors", "/x/y.zip"]
)
def test_a_missing_file_is_no_name_of_the_hub(path):
    assert path_kind(path).problem == f"there is no file {path!r}: check the path"


def test_a_mistyped_name_in_a_folder_that_exists_is_no_name_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert path_kind("models/lama").problem == "no model directory at 'models/lama': check the path"


@pytest.mark.parametrize("path", ["a" * 5000, "a\0b"])
def test_an_impossible_path_is_missing(path):
    assert path_kind(path).kind.name == "missing"


def test_a_path_with_blanks_is_quoted_in_commands(tmp_path):
    folder = written(tmp_path / "my models", {"config.json": "{}", "model.safetensors": ""})
    mark = '"' if os.name == "nt" else "'"
    assert f"export {mark}{folder}{mark} " in path_kind(folder).problem


def test_a_large_tree_is_not_searched_to_its_end(tmp_path, monkeypatch):
    for number in range(400):
        (tmp_path / str(number)).mkdir()
    looked = []
    scandir = os.scandir
    monkeypatch.setattr("os.scandir", lambda path: (looked.append(path), scandir(path))[1])
    assert path_kind(tmp_path).kind.name == "nothing"
    assert len(looked) < 300


PATHS = ("./x", "../x", "~/x", ".\\x", "C:\\models\\x", "d:/x", "models/chat", "owner/name", "/no/such/model", "chat.gguf",
         "CHAT.GGUF", "model.xml", "1.blob", "a.safetensors", ".", "here", "with blanks", "./my model",
         *(["/etc/my model"] if sys.platform != "win32" else []), "./with blanks")  # fmt: skip
TEXTS = ("hello", "what is and/or?", "and/or?", "Why?", "24/7", "1/2", "3.5", "https://example.org/a", "a.gguf or b.gguf",
         "What is model.xml", "/ is a slash", "line\n./x", "", "a" * 5000 + "/", "GGUF", "either / or",
         "/etc/passwd what is this", "./here what is in it", "./with blanks what is in it", "/etc\tis a folder")  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "with blanks").mkdir()
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("text", "expected"), [*((p, True) for p in PATHS), *((t, False) for t in TEXTS)])
def test_an_argument_that_is_a_path_or_looks_like_one_is_a_model(text, expected):
    assert is_path(text) is expected


def test_files_beside_a_gguf_model_are_not_taken_for_models(tmp_path):
    for name in ("chat-Q4_K_M.gguf", "mmproj-chat-f16.gguf", "chat.imatrix.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    found = path_kind(tmp_path)
    assert (found.is_converted, found.directory.name) == (True, "chat-Q4_K_M.gguf")


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_a_loop_of_links_is_a_missing_file(tmp_path):
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    assert path_kind(tmp_path / "loop.gguf").problem.startswith("there is no file")


@pytest.mark.parametrize("text", ["owner/model-7b/", "./owner/model-7b", "owner//model-7b", "hf.co/owner/model-7b/"])
def test_a_name_may_have_slashes_that_name_nothing(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    problem = path_kind(text).problem
    assert problem.startswith(f"no model directory at '{text}'")
    assert problem.endswith("/model-7b")
    assert "staticllm pull " in problem
