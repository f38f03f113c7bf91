"""Tests the verdict on tokenizers: texts have the ids that the library of the original gives."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import openvino_genai as genai
import pytest

from staticllm.pipelines.diagnostics.kinds import jobs_in, verdicts_of
from staticllm.pipelines.diagnostics.tokenizer_verdicts import tokenizer_verdicts


class Library:
    """The library ``tokenizers``, as far as it is used: it encodes as a model's own tokenizer does, but for one text."""

    def __init__(self, folder, changed=None):
        self.own = genai.Tokenizer(folder)
        self.changed = changed

    def from_file(self, path):
        json.loads(Path(path).read_text("utf-8"))
        return self

    def no_padding(self):
        pass

    no_truncation = no_padding

    def get_added_tokens_decoder(self):
        return {1: SimpleNamespace(content="</s>"), 0: SimpleNamespace(content="<s>")}

    def encode(self, text, add_special_tokens=True):
        ids = self.own.encode(text, add_special_tokens=add_special_tokens).input_ids.data.reshape(-1).tolist()
        return SimpleNamespace(ids=[1, 2, 3] if text == self.changed else ids)


@pytest.fixture
def folder(zoo, tmp_path):
    return shutil.copytree(zoo / "llama", tmp_path / "model", copy_function=shutil.copyfile)


def use(monkeypatch, library):
    monkeypatch.setitem(sys.modules, "tokenizers", None if library is None else SimpleNamespace(Tokenizer=library))


def test_equal_tokenizers_are_ok(folder, monkeypatch):
    use(monkeypatch, Library(folder))
    (found,) = tokenizer_verdicts(folder)
    assert found.is_ok
    assert "texts have the ids of the original" in found.line()


def test_the_first_text_that_differs_is_named_by_verify(folder, monkeypatch):
    use(monkeypatch, Library(folder, changed="version 3.14"))
    found = next(verdicts_of(jobs_in(folder, "CPU", {}), ("shared",)))
    assert found.check == "tokenizer"
    assert not found.is_ok
    assert "'version 3.14' is [" in found.line()
    assert "[1, 2, 3] in tokenizer.json: the converted tokenizer reads texts in another way" in found.line()
    assert "\n" not in found.line()


@pytest.mark.parametrize("text", ["x</s></s>\n\n", "<s>\nHi <s>"])
def test_texts_with_markers_of_chat_templates_are_compared(text, folder, monkeypatch):
    """Such as an original that takes the line ends behind a marker for no text."""
    use(monkeypatch, Library(folder, changed=text))
    (found,) = tokenizer_verdicts(folder)
    assert not found.is_ok
    assert f"{text!r} is [" in found.line()


def test_a_text_that_cannot_be_encoded_is_named(folder, monkeypatch):
    class Failing:
        def encode(self, text, **options):
            raise RuntimeError("Check 'ragged_offset < outputs[2].get_size()' failed at bpe_tokenizer.cpp:125")

    use(monkeypatch, Library(folder))
    monkeypatch.setattr("staticllm.pipelines.diagnostics.tokenizer_verdicts.read_tokenizer", lambda path: Failing())
    (found,) = tokenizer_verdicts(folder)
    assert "cannot be encoded (Check 'ragged_offset" in found.line()


@pytest.mark.parametrize("missing", ["tokenizer.json", "openvino_tokenizer.xml", "tokenizers"])
def test_nothing_is_compared_without_an_original_or_its_library(missing, folder, monkeypatch):
    use(monkeypatch, Library(folder))
    if missing == "tokenizers":
        use(monkeypatch, None)
    else:
        (folder / missing).unlink()
    assert not list(tokenizer_verdicts(folder))


def test_an_original_that_cannot_be_read_is_a_line(folder, monkeypatch):
    use(monkeypatch, Library(folder))
    (folder / "tokenizer.json").write_text("{")
    (found,) = tokenizer_verdicts(folder)
    assert not found.is_ok
    assert "tokenizer.json cannot be read" in found.line()


@pytest.mark.slow
def test_an_original_whose_markers_take_spaces_is_another_one(folder):
    pytest.importorskip("tokenizers")
    values = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    values["added_tokens"][1]["rstrip"] = True
    (folder / "tokenizer.json").write_text(json.dumps(values), "utf-8")
    (found,) = tokenizer_verdicts(folder)
    assert not found.is_ok
    assert repr(values["added_tokens"][1]["content"])[1:-1] in found.line()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2", "gpt2", "gpt_oss"])
def test_exports_of_the_zoo_have_the_ids_of_the_library(name, zoo):
    pytest.importorskip("tokenizers")
    (found,) = tokenizer_verdicts(zoo / name)
    assert found.is_ok, found.line()
