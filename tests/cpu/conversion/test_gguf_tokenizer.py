"""Tests tokenizers of GGUF files: they give the tokens of GenAI's, which reads some of these files itself."""

from __future__ import annotations

import random

import gguf
import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest
from support.models import gguf_files

from staticllm.errors import ModelError
from staticllm.pipelines.conversion.gguf_tokenizer import build_tokenizer, pairs_by_score, special_tokens
from staticllm.sources.gguf_header import read_gguf_header

LETTERS = "abc XYZ  \n\t'st're 0123456789 ,.!é日本🎉-_\r\n"
SPECIAL = ("<s>", "</s>", "<unused3>")


def saved(header, folder):
    """Return GenAI's tokenizer of the models that are built for a file."""
    folder.mkdir()
    for name, model in zip(("tokenizer", "detokenizer"), build_tokenizer(header), strict=True):
        ov.save_model(model, folder / f"openvino_{name}.xml")
    return genai.Tokenizer(str(folder))


def some_texts(count):
    source = random.Random(1)
    for _ in range(count):
        pieces = [source.choice((*LETTERS, *SPECIAL)) for _ in range(source.randint(1, 40))]
        yield "".join(pieces)


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe", "gpt-2"])
def test_texts_are_split_and_merged_as_genai_does(pre, model_path, tmp_path, monkeypatch):
    add = gguf.GGUFWriter.add_tokenizer_pre
    monkeypatch.setattr(gguf.GGUFWriter, "add_tokenizer_pre", lambda writer, name: add(writer, pre))
    path = tmp_path / "model.gguf"
    gguf_files.write(model_path("llama"), path, "llama", "Q8_0")
    own = saved(read_gguf_header(path), tmp_path / "own")
    peer = genai.Tokenizer(str(path))
    assert (own.get_bos_token_id(), own.get_eos_token_id()) == (peer.get_bos_token_id(), peer.get_eos_token_id())
    for text in some_texts(500):
        for adds in (True, False):
            found = own.encode(text, add_special_tokens=adds).input_ids.data.tolist()
            assert found == peer.encode(text, add_special_tokens=adds).input_ids.data.tolist(), text
        for skips in (True, False):
            assert own.decode(found[0], skip_special_tokens=skips) == peer.decode(found[0], skip_special_tokens=skips)


def a_vocabulary(path, *, kind="llama", tokens=None, scores=None, **more):
    """Write a file with a vocabulary and no tensors, and return its header."""
    pieces = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello", "w", "r", "d"]
    tokens = tokens or ["<unk>", "<s>", "</s>", *(f"<0x{each:02X}>" for each in range(256)), *pieces]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(more.pop("types", [2, 3, 3, *([6] * 256), *([1] * (len(tokens) - 259))]))
    if scores is not False:
        writer.add_token_scores(scores or [-float(place) for place in range(len(tokens))])
    bos = more.pop("bos", 1)
    writer.add_bos_token_id(bos) if isinstance(bos, int) else writer.add_string("tokenizer.ggml.bos_token_id", bos)
    writer.add_eos_token_id(2)
    if "merges" in more:
        writer.add_token_merges(more.pop("merges"))
    for key, value in more.items():
        writer.add_key_value(f"tokenizer.{key}", value, gguf.GGUFValueType.STRING)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf_header(path)


def test_pairs_with_scores_are_merged_best_first_and_bytes_stand_for_unknown_letters(tmp_path):
    header = a_vocabulary(tmp_path / "model.gguf")
    tokenizer = saved(header, tmp_path / "own")
    place = header.metadata["tokenizer.ggml.tokens"].index
    ids = tokenizer.encode("hello wé</s>").input_ids.data[0].tolist()
    assert ids == [1, place("▁hello"), place("▁"), place("w"), 3 + 0xC3, 3 + 0xA9, 2]
    assert tokenizer.decode(ids) == "hello wé"


def test_pairs_come_in_the_order_of_their_scores():
    assert pairs_by_score(["a", "b", "ab", "ba", "aba"], np.array([0, 0, -2, -1, -3])) == [
        ("b", "a"), ("a", "b"), ("a", "ba"), ("ab", "a"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "change,said",
    [
        ({"kind": "t5"}, "a vocabulary of the kind 't5', and gpt2 and llama can be read"),
        (
            {"kind": "gpt2", "ggml.pre": "martian"},
            "splits texts in a way that is not known (tokenizer.ggml.pre is 'martian')",
        ),
        ({"kind": "gpt2", "ggml.pre": "gpt-2"}, "no pairs to merge"),
        ({"scores": False}, "no score for each of its tokens"),
        ({"bos": 9999}, "tokenizer.ggml.bos_token_id 9999, and 272 tokens"),
        ({"bos": "x"}, "tokenizer.ggml.bos_token_id 'x', and 272 tokens"),
        ({"kind": "gpt2", "ggml.pre": "gpt-2", "merges": ["h e", "h q"]}, "merges 'h q' to what is no token"),
        ({"ggml.add_bos_token": "yes"}, "add_bos_token 'yes', which must be true or false"),
        ({"types": [1, 2]}, "272 tokens and other types of them"),
    ],
)
def test_a_vocabulary_that_cannot_be_used_gets_one_line(change, said, tmp_path):
    header = a_vocabulary(tmp_path / "model.gguf", **change)
    with pytest.raises(ModelError) as error:
        build_tokenizer(header)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_tokens_that_end_a_turn_are_found_by_their_texts(tmp_path):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{each:02X}>" for each in range(256)), "a", "<|im_end|>"]
    types = [2, 3, 3, *([6] * 256), 1, 3]
    assert special_tokens(a_vocabulary(tmp_path / "model.gguf", tokens=tokens, types=types)).ends == (2, 260)


def test_a_text_of_html_does_not_end_an_answer_if_the_file_says_what_does(tmp_path):
    tokens = ["<unk>", "<bos>", "<eos>", *(f"<0x{each:02X}>" for each in range(256)), "</s>", "<|eom_id|>"]
    types = [2, 3, 3, *([6] * 256), 4, 3]
    assert special_tokens(a_vocabulary(tmp_path / "model.gguf", tokens=tokens, types=types)).ends == (2, 260)


def test_tokens_of_equal_texts_are_read_and_ends_are_special_without_their_types(tmp_path):
    pieces = ["▁", "h", "e", "he", "he"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{each:02X}>" for each in range(256)), *pieces]
    header = a_vocabulary(tmp_path / "model.gguf", tokens=tokens, types=[2, 1, 1, *([6] * 256), *([1] * 5)])
    tokenizer = saved(header, tmp_path / "own")
    ids = tokenizer.encode("he").input_ids.data[0].tolist()
    assert ids[-1] == len(tokens) - 1
    assert tokenizer.decode(ids) == "he"
    assert tokenizer.encode("</s>", add_special_tokens=False).input_ids.data[0, -1] == 2
