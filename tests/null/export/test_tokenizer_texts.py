"""Tests the comparison of two tokenizers: the first text that differs is named in a line."""

from __future__ import annotations

import pytest

from staticllm.export.tokenizer_texts import first_difference, sample_texts


def letters(text):
    return list(map(ord, text))


def without_digits(text):
    return [ord(each) for each in text if not each.isdigit()]


def failing(text):
    if "2024" in text:
        raise RuntimeError("Check 'ragged_offset < size' failed at\nbpe_tokenizer.cpp:125")
    return letters(text)


def test_the_texts_are_some_hundred_and_always_the_same():
    texts = sample_texts()
    assert len(texts) > 300
    assert texts == sample_texts()
    everything = "".join(texts)
    for part in ("  ", "\n", "\t", "7", "é", "日", "д", "🎉", "<", "'s "[:2]):
        assert part in everything


def test_added_tokens_are_in_the_texts_and_not_too_many():
    texts = sample_texts([f"<|{number}|>" for number in range(1000)])
    assert texts[: len(sample_texts())] == sample_texts()
    assert "a <|0|> b" in texts
    assert len(texts) < 600


@pytest.mark.parametrize(
    "here,there,said",
    [
        (letters, letters, None),
        (without_digits, letters, "'version 3.14' is [118, 101, 114, 115, 105, 111, 110, 32, 46], [118, 101,"),
        (
            failing,
            letters,
            "'in 2024' cannot be encoded (Check 'ragged_offset < size' failed at bpe_tokenizer.cpp:125), [105, 110, 32,",
        ),
    ],
)
def test_the_first_text_that_differs_is_named(here, there, said):
    found = first_difference(here, lambda text: [there(text)], sample_texts())
    if said is None:
        assert found is None
    else:
        assert found.startswith(said)
        assert "use the model's GGUF file, or export it with another version" in found
        assert "\n" not in found


def test_ids_with_and_without_special_tokens_are_both_right():
    assert first_difference(letters, lambda text: [[0, *letters(text)], letters(text)], sample_texts()) is None


def test_a_long_text_is_cut():
    found = first_difference(lambda text: [], lambda text: [list(range(1000))], ["x" * 1000])
    assert len(found) < 500
