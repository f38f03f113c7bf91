"""When each word was spoken, by the cross-attention of the decoder (as openai-whisper's ``timing.py``, with GenAI's edges).

The decoder is fed ``alignment_tokens`` once more after a window was decoded. The alignment heads look at the frames that belong
to the next token, so the cheapest monotonic path through their weights gives each token its first frame.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .results import WhisperWordTiming
from .whisper_config import WhisperTokens

Decode: TypeAlias = Callable[[list[int]], str]
Weights: TypeAlias = NDArray[np.float32]
WIDTH = 7
"""The frames of the median filter."""
LEAST_DEVIATION = 1e-6
MAX_MEDIAN_SECONDS = 0.7
"""A word of twice the median length is too long beside the end of a sentence; a longer median counts as this one."""
WITHOUT_SPACES = frozenset(["zh", "ja", "th", "lo", "my", "yue"])
"""Languages that are written without spaces: each character is a word."""
PUNCTUATION = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
SENTENCE_ENDS = frozenset(".。!！?？")
BEFORE_WORDS = frozenset("\"'“¿([{-")
AFTER_WORDS = frozenset("\"'.。,，!！?？:：”)]}、")
REPLACEMENT = "\ufffd"


def text_tokens_of(generated: Sequence[int], tokens: WhisperTokens) -> list[int]:
    """Return the tokens of a window's text: those that are not special."""
    return [token for token in generated if token < tokens.eos]


def alignment_tokens(start: Sequence[int], text: Sequence[int], tokens: WhisperTokens) -> list[int]:
    """Return what the decoder is fed to find the words: the window's start without the text before it, its text, and the end."""
    return [*start, tokens.no_timestamps, *text, tokens.eos]


def token_starts(weights: Weights, num_start: int, num_frames: int) -> NDArray[np.intp]:
    """Return the first frame of each token of the text, and of the end, ``[text + 1]``, in steps of 0.02 s.

    Args:
        weights: What the alignment heads weigh, ``[heads, tokens, frames]``, after the softmax, for ``alignment_tokens``.
        num_start: The number of the tokens ``start``.
        num_frames: The number of frames of the encoder that are not padding: half of those of the features.
    """
    num_rows = weights.shape[1] - 1 - num_start
    num_frames = min(num_frames, weights.shape[2])
    if num_frames < 1 or num_rows < 1:
        return np.zeros(max(num_rows, 0), np.intp)
    matrix = np.zeros((num_rows, num_frames), np.float32)
    for head in weights:
        matrix += median_filtered(_standardised(head[:, :num_frames]))[num_start:-1]
    matrix /= -len(weights)
    return cheapest_starts(matrix)


def _standardised(weights: Weights) -> Weights:
    """Return the weights ``[tokens, frames]`` of one head, normalised per token, then standardised per frame."""
    sums = weights.sum(axis=1, keepdims=True)
    shares = weights / np.where(sums > 0, sums, np.float32(1))
    deviation = shares.std(axis=0)
    found: Weights = (shares - shares.mean(axis=0)) / np.maximum(deviation, np.float32(LEAST_DEVIATION))
    return found


_MEDIAN_OF_7 = (
    (0, 5), (0, 3), (1, 6), (2, 4), (0, 1), (3, 5), (2, 6), (2, 3), (3, 6), (4, 5), (1, 4), (1, 3), (3, 4),
)  # fmt: skip
"""The pairs of a network that brings the median of 7 values to place 3 (N. Devillard, "Fast median search")."""


def median_filtered(weights: Weights) -> Weights:
    """Return the medians of 7 neighbours in each row of ``weights [rows, frames]``; of fewer at the two ends."""
    half = WIDTH // 2
    num_frames = weights.shape[1]
    found = np.empty_like(weights)
    num_inner = max(0, num_frames - 2 * half)
    if num_inner:
        values = [weights[:, shift : shift + num_inner].copy() for shift in range(WIDTH)]
        for low, high in _MEDIAN_OF_7:
            values[low], values[high] = np.minimum(values[low], values[high]), np.maximum(values[low], values[high])
        found[:, half : half + num_inner] = values[half]
    for frame in (*range(min(half, num_frames)), *range(max(half, num_frames - half), num_frames)):
        found[:, frame] = np.median(weights[:, max(0, frame - half) : frame + half + 1], axis=1)
    return found


DIAGONAL, UP, LEFT = 0, 1, 2


def cheapest_starts(cost: NDArray[np.float32]) -> NDArray[np.intp]:
    """Return the first column of each row on the cheapest path through ``cost [rows, columns]``, by dynamic time warping.

    The path goes from the first cell to the last, by a row, a column, or both at a time. Costs are added in float32, and ties are
    broken, as in transformers and GenAI. All cells of an anti-diagonal are computed at once.
    """
    moves = _moves(cost)
    row, column = cost.shape
    starts = np.zeros(row, np.intp)
    while row > 0:
        starts[row - 1] = max(column - 1, 0)
        move = UP if column == 0 else moves[row + column, row]
        row -= move != LEFT
        column -= move != UP
    return starts


def _moves(cost: NDArray[np.float32]) -> NDArray[np.int8]:
    """Return the last move of the cheapest path to each cell, as ``[row + column, row]``, both from 1."""
    num_rows, num_columns = cost.shape
    skewed = np.full((num_rows + num_columns + 1, num_rows + 1), np.inf, np.float32)
    rows = np.arange(1, num_rows + 1)
    for column in range(num_columns):
        skewed[rows + column + 1, rows] = cost[:, column]
    moves = np.full(skewed.shape, LEFT, np.int8)
    before = np.full(num_rows + 1, np.inf, np.float32)  # two anti-diagonals ago
    before[0] = 0
    last = np.full(num_rows + 1, np.inf, np.float32)
    for index in range(2, num_rows + num_columns + 1):
        diagonal = before[:-1]
        up = last[:-1]
        left = last[1:]
        best = np.minimum(up, left)
        is_diagonal = diagonal < best
        move = np.where(is_diagonal, np.int8(DIAGONAL), np.int8(LEFT))
        move[(up < diagonal) & (up < left)] = UP
        current = np.full(num_rows + 1, np.inf, np.float32)
        chosen = np.where(is_diagonal, diagonal, np.where(move == UP, up, left))
        current[1:] = skewed[index, 1:] + chosen
        moves[index, 1:] = move
        before = last
        last = current
    return moves


@dataclass(frozen=True)
class _Word:
    """A word, its tokens, and when it was spoken, seconds after the beginning of the window."""

    text: str
    tokens: tuple[int, ...]
    start: float = 0.0
    end: float = 0.0


def words_of(
    text: Sequence[int],
    starts: NDArray[np.intp],
    decode: Decode,
    language: str,
    offset: float = 0.0,
    latest: float = math.inf,
    seconds_per_frame: float = 0.02,
) -> list[WhisperWordTiming]:
    """Return the words of a window, with their times in the recording. Their texts, one after another, are the window's.

    Args:
        text: The tokens of the text, ``[n]``.
        starts: The first frame of each, and of the end, ``[n + 1]``; the rest begins with the last one if there are fewer.
        decode: Makes text of tokens; a part of a character must become U+FFFD.
        language: The code of the language.
        offset: When the window begins, seconds.
        latest: When the next window begins; no word is later.
        seconds_per_frame: Seconds of a frame of the encoder.
    """
    starts = np.pad(starts, (0, max(0, len(text) + 1 - len(starts))), "edge")
    split = characters_of(list(text), decode)
    words = split if language in WITHOUT_SPACES else joined_at_spaces(split)
    timed = []
    place = 0
    for word in words:
        end = place + len(word.tokens)
        times = (float(starts[place]) * seconds_per_frame, float(starts[end]) * seconds_per_frame)
        timed.append(replace(word, start=times[0], end=times[1]))
        place = end
    return [
        WhisperWordTiming(
            word.text, list(word.tokens), min(offset + word.start, latest), min(offset + word.end, latest)
        )
        for word in with_punctuation(shortened(timed))
    ]


def characters_of(tokens: list[int], decode: Decode) -> list[_Word]:
    """Return the smallest groups of tokens whose texts, one after another, are that of all tokens."""
    whole_text = decode(tokens)
    found: list[_Word] = []
    group: list[int] = []
    offset = 0
    for index, token in enumerate(tokens):
        group.append(token)
        text = decode(group)
        if not whole_text.startswith(text, offset):  # half a character, or a text that depends on those before it
            begun = decode(tokens[: index + 1])
            text = begun[offset:] if whole_text.startswith(begun) else ""
        if text:
            found.append(_Word(text, tuple(group)))
            group = []
            offset += len(text)
    if group:
        found.append(_Word(whole_text[offset:], tuple(group)))
    return found


def joined_at_spaces(parts: Sequence[_Word]) -> list[_Word]:
    """Return words, each a part that begins with a space or is punctuation, and the parts after it."""
    found: list[_Word] = []
    for part in parts:
        if not found or part.text[:1].isspace() or part.text.strip() in PUNCTUATION:
            found.append(part)
        else:
            found[-1] = _joined(found[-1], part)
    return found


def shortened(words: Sequence[_Word]) -> list[_Word]:
    """Return the words, those at the ends of sentences not longer than twice the median: the rest is a pause."""
    lengths = [word.end - word.start for word in words if word.end > word.start]
    if not lengths:
        return list(words)
    longest = 2 * min(MAX_MEDIAN_SECONDS, statistics.median(lengths))
    found = list(words)
    for index in range(1, len(found)):
        word = found[index]
        if word.end - word.start > longest:
            if word.text in SENTENCE_ENDS:
                found[index] = replace(word, end=word.start + longest)
            elif found[index - 1].text in SENTENCE_ENDS:
                found[index] = replace(word, start=word.end - longest)
    return found


def with_punctuation(words: Sequence[_Word]) -> list[_Word]:
    """Return the words with the punctuation around them, which does not change their times."""
    before: list[_Word] = []
    for word in reversed(words):
        if before and word.text[:1] == " " and word.text[1:] in BEFORE_WORDS:
            following = before[-1]
            before[-1] = replace(following, text=word.text + following.text, tokens=word.tokens + following.tokens)
        else:
            before.append(word)
    found: list[_Word] = []
    for word in reversed(before):
        if found and word.text in AFTER_WORDS and not found[-1].text.endswith(" "):
            found[-1] = replace(found[-1], text=found[-1].text + word.text, tokens=found[-1].tokens + word.tokens)
        else:
            found.append(word)
    return [word for word in found if word.text]


def _joined(first: _Word, second: _Word) -> _Word:
    return replace(first, text=first.text + second.text, tokens=first.tokens + second.tokens)


def with_whole_characters(words: Sequence[WhisperWordTiming], decode: Decode) -> list[WhisperWordTiming]:
    """Return the words of a recording. Two of them are one where the first ends within a character that the second continues, as
    at the border of two windows: the text of the recording has one character there, or one mark in its place.
    """
    found: list[WhisperWordTiming] = []
    for word in words:
        if found and found[-1].word.endswith(REPLACEMENT) and word.word.startswith(REPLACEMENT):
            tokens = found[-1].token_ids + word.token_ids
            found[-1] = WhisperWordTiming(decode(tokens), tokens, found[-1].start_ts, word.end_ts)
        else:
            found.append(word)
    return found
