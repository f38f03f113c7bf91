"""Tests tokenizers of GGUF files: they give the tokens of GenAI's, which reads some of these files itself."""

from __future__ import annotations

import random

import gguf
import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest
from support.models import gguf_files, gguf_texts

from staticllm.compiler_passes.conversion.gguf_merges import pairs_by_score
from staticllm.compiler_passes.conversion.gguf_tokenizer import (
    SPLITS,
    assumed,
    build_tokenizer,
    check_vocabulary,
    special_tokens,
)
from staticllm.errors import ModelError
from staticllm.model_files.gguf_header import read_gguf_header

LETTERS = "abc XYZ  \n\t'st're 0123456789 ,.!é日本🎉-_\r\n"
SPECIAL = ("<s>", "</s>")


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
        for adds in (False,) if pre == "llama-bpe" else (True, False):  # GenAI begins no text there, llama.cpp does
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
        ({"kind": "gpt2"}, "does not say how texts are split (tokenizer.ggml.pre is missing)"),
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


WHOLE = {"llama-bpe", "tekken"}
"""Splits behind which a word that is a token is that token."""
KINDS = [
    "llama",
    "llama without bytes",
    *{(split, pre in WHOLE, pre == "qwen2"): pre for pre, split in SPLITS.items()}.values(),
]
"""All kinds of vocabularies: with scores, and with pairs for each way to split texts."""


def random_vocabulary(kind, seed):
    if kind in SPLITS:
        return gguf_texts.byte_pairs(seed, kind)
    return gguf_texts.scored_pairs(seed, has_bytes=kind == "llama")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed,count", [(0, 50), pytest.param(1, 2000, marks=pytest.mark.slow)])
def test_random_texts_have_the_tokens_that_pairs_make_of_letters(kind, seed, count, tmp_path):
    vocabulary = random_vocabulary(kind, seed)
    tokenizer = saved(vocabulary.write(tmp_path / "model.gguf"), tmp_path / "own")
    for text in gguf_texts.random_texts(seed, count):
        found = tokenizer.encode(text, add_special_tokens=False).input_ids.data[0].tolist()
        wanted = gguf_texts.ids_of(vocabulary, text, SPLITS.get(kind, ()), kind in WHOLE, kind == "qwen2")
        assert found == wanted, (text, [vocabulary.tokens[each] for each in found])
        if kind in SPLITS and kind != "qwen2":
            assert tokenizer.decode(found, skip_special_tokens=False) == text


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_random_texts_have_the_tokens_of_the_library_tokenizers(kind, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = random_vocabulary(kind, 2)
    own = saved(vocabulary.write(tmp_path / "model.gguf"), tmp_path / "own")
    peer = gguf_texts.peer_of(tokenizers, vocabulary, SPLITS.get(kind, ()), kind in WHOLE, kind == "qwen2")
    for text in gguf_texts.random_texts(2, 2000):
        found = own.encode(text, add_special_tokens=False).input_ids.data[0].tolist()
        assert found == peer.encode(text, add_special_tokens=False).ids, text


STRIPPING = ("</s>", "<|x|>", "<|user|>")


@pytest.mark.parametrize("architecture", ["phi3", "llama"])
@pytest.mark.parametrize("seed,count", [(0, 200), pytest.param(1, 3000, marks=pytest.mark.slow)])
def test_spaces_behind_markers_are_no_text_where_the_architecture_says_so(seed, count, architecture, tmp_path):
    """As in the original's tokenizer, whose markers have ``rstrip``; a chat template writes a line end behind each."""
    vocabulary = gguf_texts.scored_pairs(seed)
    vocabulary.tokens += ["<|user|>", "<|endoftext|>"]
    vocabulary.types += [gguf_texts.CONTROL] * 2
    vocabulary.scores += [-1e4, -1e4]
    tokenizer = saved(vocabulary.write(tmp_path / "model.gguf", architecture=architecture), tmp_path / "own")
    stripping = STRIPPING if architecture == "phi3" else ()
    source = random.Random(seed)
    for drawn in gguf_texts.random_texts(seed, count):
        words = [*drawn, *"  \n\t", *STRIPPING, "<|user|>\n", "<|endoftext|>", "<unk>", "<s>"]
        text = "".join(source.choice(words) for _ in range(source.randint(1, 24)))
        found = tokenizer.encode(text, add_special_tokens=False).input_ids.data[0].tolist()
        assert found == gguf_texts.ids_of(vocabulary, text, stripping=stripping), text


def a_byte_vocabulary(path, *, merges=("a b", "Ġ a", "Ġ ab"), words=("ab", "Ġa", "Ġab", "abc", "hello", "xyz"), **more):
    """Write a file with all bytes, pairs, and words that no pair builds."""
    tokens = [*gguf_texts.byte_letters().values(), *words, "<s>", "</s>"]
    types = [1] * (len(tokens) - 2) + [3, 3]
    pre = more.pop("pre", "gpt-2")
    return gguf_texts.Vocabulary("gpt2", tokens, types, list(merges), pre=pre).write(path, **more)


def tokens_of(tokenizer, header, text, **options):
    ids = tokenizer.encode(text, **options).input_ids.data[0]
    return [header.metadata["tokenizer.ggml.tokens"][each] for each in ids]


def test_words_that_no_pair_builds_are_not_found_in_others(tmp_path):
    header = a_byte_vocabulary(tmp_path / "model.gguf")
    tokenizer = saved(header, tmp_path / "own")
    assert tokens_of(tokenizer, header, "xabcy") == ["x", "ab", "c", "y"]
    assert tokens_of(tokenizer, header, "hello") == [*"hello"]


def test_words_that_are_tokens_are_taken_as_a_whole_where_the_split_says_so(tmp_path):
    header = a_byte_vocabulary(tmp_path / "model.gguf", pre="llama-bpe")
    tokenizer = saved(header, tmp_path / "own")
    assert tokens_of(tokenizer, header, "hello") == ["<s>", "hello"], "and such texts begin with a token"
    assert tokens_of(tokenizer, header, "hellos abc", add_special_tokens=False) == [*"hellos", "Ġab", "c"]


@pytest.mark.parametrize(
    "architecture,pre", [("qwen2", "qwen2"), ("qwen3", "qwen2"), ("smollm3", "llama-bpe"), ("mistral3", "tekken")]
)
def test_a_missing_split_is_that_of_the_architecture_and_a_line_says_it(architecture, pre, tmp_path):
    header = a_byte_vocabulary(tmp_path / "model.gguf", pre=None, architecture=architecture)
    other = a_byte_vocabulary(tmp_path / "other.gguf", pre=pre, architecture=architecture)
    (line,) = assumed(header)
    assert f"tokenizer.ggml.pre is missing): they are split as {pre} does" in line
    assert not assumed(other)
    own, peer = saved(header, tmp_path / "own"), saved(other, tmp_path / "peer")
    for text in gguf_texts.random_texts(3, 100):
        assert own.encode(text).input_ids.data.tolist() == peer.encode(text).input_ids.data.tolist()


@pytest.mark.parametrize("architecture", ["llama", "phi3", "hunyuan-dense", "minicpm", "gemma3"])
def test_a_missing_split_of_an_architecture_with_several_is_refused(architecture, tmp_path):
    with pytest.raises(ModelError, match="do it in several ways"):
        check_vocabulary(a_byte_vocabulary(tmp_path / "model.gguf", pre=None, architecture=architecture))


def test_the_default_split_takes_punctuation_and_three_digits_apart(tmp_path):
    header = a_byte_vocabulary(
        tmp_path / "model.gguf", pre="default", merges=[". =", "0 1", "2 3", "01 2"], words=[".=", "01", "23", "012"]
    )
    assert tokens_of(saved(header, tmp_path / "own"), header, "x.=01230123") == ["x", ".=", "012", "3", "01", "23"]


HARMLESS = [
    *({f"ggml.{what}_token_id": (value, kind)} for what in ("padding", "eot", "eom", "unknown", "mask", "seperator")
      for value, kind in ((2**32 - 1, "UINT32"), (-1, "INT32"), (-1, "INT64"), (2**64 - 1, "UINT64"), (10**6, "UINT32"))),
    {"ggml.add_bos_token": (1, "UINT8"), "ggml.add_eos_token": (0, "UINT8")},
    {"ggml.add_bos_token": (1, "INT32")},
]  # fmt: skip


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("facts", HARMLESS, ids=str)
def test_harmless_values_stop_no_file(facts, kind, tmp_path):
    vocabulary = random_vocabulary("gpt-2" if kind == "gpt2" else "llama", 4)
    header = vocabulary.write(tmp_path / "model.gguf", **facts)
    build_tokenizer(header)
    assert special_tokens(header).pad is None


def test_more_types_and_scores_than_tokens_stop_no_file(tmp_path):
    vocabulary = random_vocabulary("llama", 4)
    plain = saved(vocabulary.write(tmp_path / "plain.gguf"), tmp_path / "plain")
    vocabulary.types.append(1)
    vocabulary.scores.append(0.0)
    tokenizer = saved(vocabulary.write(tmp_path / "model.gguf"), tmp_path / "own")
    for text in gguf_texts.random_texts(5, 50):
        assert tokenizer.encode(text).input_ids.data.tolist() == plain.encode(text).input_ids.data.tolist()


@pytest.mark.parametrize("what", ["bos", "eos"])
def test_a_token_that_begins_or_ends_a_text_may_be_none(what, tmp_path):
    header = a_byte_vocabulary(tmp_path / "model.gguf")
    header.metadata[f"tokenizer.ggml.{what}_token_id"] = 2**32 - 1
    assert getattr(special_tokens(header), what) == (
        None if what == "bos" else special_tokens(header).ends[0] if special_tokens(header).ends else None
    )
    tokenizer = saved(header, tmp_path / "own")
    assert tokens_of(tokenizer, header, "ab") == ["ab"]
