"""Tests the times of words: the path and the filter against the plain loops, and words against openai-whisper's rules."""

from __future__ import annotations

import time

import numpy as np
import pytest

from staticllm.pipelines.speech.whisper_config import WhisperTokens
from staticllm.pipelines.speech.words import (
    alignment_tokens,
    cheapest_starts,
    median_filtered,
    text_tokens_of,
    token_starts,
    words_of,
)

TOKENS = WhisperTokens()


def plain_starts(cost):
    """Return the first column of each row, by the loops of transformers' ``_dynamic_time_warping``."""
    rows, columns = cost.shape
    total = np.full((rows + 1, columns + 1), np.inf, np.float32)
    moves = np.zeros((rows + 1, columns + 1), int)
    total[0, 0] = 0
    for column in range(1, columns + 1):
        for row in range(1, rows + 1):
            options = total[row - 1, column - 1], total[row - 1, column], total[row, column - 1]
            move = 2
            if options[0] < options[1] and options[0] < options[2]:
                move = 0
            elif options[1] < options[0] and options[1] < options[2]:
                move = 1
            total[row, column] = cost[row - 1, column - 1] + options[move]
            moves[row, column] = move
    moves[0, :] = 2
    moves[:, 0] = 1
    row, column, path = rows, columns, []
    while row or column:
        path.append((row - 1, column - 1))
        move = moves[row, column]
        row -= move != 2
        column -= move != 1
    return [min(at for index, at in path if index == row) for row in range(rows)]


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (7, 3), (3, 40), (30, 90)])
@pytest.mark.parametrize("has_ties", [False, True])
def test_the_path_is_that_of_the_loops(shape, has_ties):
    random = np.random.default_rng(sum(shape))
    for _ in range(5):
        cost = random.normal(size=shape).astype(np.float32)
        cost = cost.round() if has_ties else cost
        assert cheapest_starts(cost).tolist() == plain_starts(cost)


def test_the_path_is_found_fast():
    cost = np.random.default_rng(0).normal(size=(100, 1500)).astype(np.float32)
    seconds = []
    for _ in range(5):
        start = time.thread_time()
        cheapest_starts(cost)
        seconds.append(time.thread_time() - start)
    assert min(seconds) < 0.05


@pytest.mark.parametrize("num_frames", [1, 2, 5, 6, 7, 8, 50])
def test_medians_of_7_neighbours_and_of_fewer_at_the_ends(num_frames):
    weights = np.random.default_rng(num_frames).normal(size=(4, num_frames)).astype(np.float32)
    expected = [
        [np.median(row[max(0, frame - 3) : frame + 4]) for frame in range(num_frames)] for row in weights.tolist()
    ]
    np.testing.assert_allclose(median_filtered(weights), expected, rtol=1e-6)


def looking_at(frames_of_tokens, num_frames, num_heads=3):
    """Return weights with which each token looks at its frames, with some noise."""
    random = np.random.default_rng(0)
    weights = random.random((num_heads, len(frames_of_tokens), num_frames)) * 0.01
    for token, frames in enumerate(frames_of_tokens):
        weights[:, token, frames] += 1
    return (weights / weights.sum(axis=2, keepdims=True)).astype(np.float32)


def test_tokens_start_where_their_heads_begin_to_look():
    looks = [slice(0, 2), slice(0, 1), slice(0, 30), slice(30, 60), slice(60, 100), slice(100, 120), slice(0, 120)]
    starts = token_starts(looking_at(looks, 200), num_start=2, num_frames=120)
    assert starts.tolist() == pytest.approx([0, 30, 60, 100], abs=3)


@pytest.mark.parametrize("num_frames", [0, 1, 5])
def test_hardly_any_frames(num_frames):
    starts = token_starts(looking_at([slice(0, 9)] * 6, 50), num_start=1, num_frames=num_frames)
    assert starts.shape == (4,)
    assert starts.max() <= max(0, num_frames - 1)


def test_weights_of_zero_are_no_numbers_that_break_the_path():
    assert np.isfinite(token_starts(np.zeros((2, 6, 30), np.float32), 1, 30)).all()


def test_what_the_decoder_is_fed():
    assert text_tokens_of([50364, 5, 6, 50464, 50257], TOKENS) == [5, 6]
    assert alignment_tokens([50258, 50259], [5, 6], TOKENS) == [50258, 50259, 50363, 5, 6, 50257]


class Bytes:
    """A tokenizer whose tokens are the given pieces of bytes."""

    def __init__(self, *pieces):
        self.pieces = [piece if isinstance(piece, bytes) else piece.encode() for piece in pieces]
        self.tokens = list(range(len(pieces)))

    def __call__(self, tokens):
        return b"".join(self.pieces[token] for token in tokens).decode(errors="replace")


def words(*pieces, language="en", starts=None):
    decode = Bytes(*pieces)
    starts = np.arange(len(pieces) + 1) * 50 if starts is None else np.array(starts)
    return words_of(decode.tokens, starts, decode, language, offset=30.0)


def test_tokens_are_joined_up_to_the_next_space():
    found = words(" The", " pru", "dent", "ly", " man")
    assert [word.word for word in found] == [" The", " prudently", " man"]
    assert [word.token_ids for word in found] == [[0], [1, 2, 3], [4]]
    assert [(word.start_ts, word.end_ts) for word in found] == [(30, 31), (31, 34), (34, 35)]


def test_punctuation_belongs_to_a_word_and_has_no_time():
    found = words(" He", " said", ",", ' "', "No", "!", '"', starts=[0, 50, 100, 101, 102, 150, 151, 152])
    assert [word.word for word in found] == [" He", " said,", ' "No!"']
    assert found[1].token_ids == [1, 2]
    assert (found[1].start_ts, found[1].end_ts) == (31, 32)
    assert found[2].token_ids == [3, 4, 5, 6]


def test_characters_of_several_tokens():
    first, second = "é".encode()[:1], "é".encode()[1:]
    found = words(" caf", first, second, " x")
    assert [word.word for word in found] == [" café", " x"]
    assert found[0].token_ids == [0, 1, 2]


def test_bytes_that_are_no_character_are_kept():
    found = words(" a", b"\xff", " b")
    assert [word.word for word in found] == [" a\ufffd", " b"]
    assert [word.word for word in words(" a", b"\xe3")] == [" a\ufffd"]


def test_languages_without_spaces_have_a_word_per_character():
    pieces = ["今", "天".encode()[:1], "天".encode()[1:], "好", "。"]
    found = words(*pieces, language="zh")
    assert [word.word for word in found] == ["今", "天", "好。"]
    assert [word.token_ids for word in found] == [[0], [1, 2], [3, 4]]


def test_a_pause_is_no_part_of_the_word_beside_the_end_of_a_sentence():
    found = words(" a", " b", ".", " c", " d", starts=[0, 20, 40, 41, 300, 320])
    assert [word.word for word in found] == [" a", " b.", " c", " d"]
    assert found[2].start_ts == pytest.approx(36 - 0.8)  # twice the median of 0.4 s
    assert found[2].end_ts == 36


def test_no_text_no_words():
    assert words_of([], np.zeros(1, np.intp), lambda tokens: "", "en") == []
