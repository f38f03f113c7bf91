"""Tests segments and the beginning of the next window, with the cases that GenAI's ``extract_segments`` tells apart."""

from __future__ import annotations

from itertools import product

import pytest

from staticllm.pipelines.speech.log_mel import MelConfig
from staticllm.pipelines.speech.segments import SpeechSegment, WindowTimes, segments_of
from staticllm.pipelines.speech.whisper_config import WhisperTokens

EOS, BEGIN = 50257, 50364
TIMES = WindowTimes.of(WhisperTokens(), MelConfig())


def at(seconds):
    return BEGIN + round(seconds * 50)


def plainly(tokens):
    """Return segments (start, end, text) in steps of 0.02 s and the advance, by splitting at pairs."""
    stamps = [index for index, token in enumerate(tokens) if token >= BEGIN]
    found, first = [], None
    for index in stamps:
        if first is None:
            first = index
        elif tokens[index] != tokens[first]:
            found.append((tokens[first] - BEGIN, tokens[index] - BEGIN, tokens[first + 1 : index]))
            first = None
    is_open = first is not None
    if is_open and not found and first + 1 < len(tokens):
        return [(tokens[first] - BEGIN, None, tokens[first + 1 :])], 3000
    return found, 2 * found[-1][1] if found and is_open else 3000


def test_times_are_those_of_the_model():
    assert WindowTimes(BEGIN, EOS, 0.02, 2, 3000) == TIMES


def test_a_pair_at_the_end_begins_the_next_window():
    found = segments_of([at(0), 5, 6, at(2.5), at(2.5), 7, at(4), at(4), EOS], TIMES, offset=30.0)
    assert found.segments == (SpeechSegment(30.0, 32.5, (5, 6)), SpeechSegment(32.5, 34.0, (7,)))
    assert found.advance == 400
    assert found.ranges == ((1, 3), (5, 6))
    assert found.text == (5, 6, 7)


def test_a_single_timestamp_at_the_end_ends_the_window():
    found = segments_of([at(0.4), 5, at(2), EOS], TIMES)
    assert found.segments == (SpeechSegment(pytest.approx(0.4), 2.0, (5,)),)
    assert found.advance == 3000


def test_text_that_the_window_cuts_is_heard_again():
    found = segments_of([at(0), 5, at(28), at(28), 6, 7, EOS], TIMES)
    assert found.segments == (SpeechSegment(0.0, 28.0, (5,)),)
    assert found.advance == 2800


def test_text_without_an_end_is_one_segment_if_it_is_all():
    found = segments_of([at(1), 5, 6], TIMES)
    assert found.segments == (SpeechSegment(1.0, None, (5, 6)),)
    assert found.advance == 3000


@pytest.mark.parametrize("tokens", [[], [EOS], [5, 6], [at(0)], [at(3), at(3)]])
def test_a_window_without_segments_is_passed(tokens):
    found = segments_of(tokens, TIMES)
    assert found.text == ()
    assert found.advance == 3000


def test_a_repeated_timestamp_is_a_beginning():
    found = segments_of([at(1), at(1), 5, at(2), EOS], TIMES)
    assert found.segments == (SpeechSegment(1.0, 2.0, (5,)),)


def test_every_short_sequence():
    for length in range(1, 7):
        for tokens in product([5, at(0), at(0.02), at(0.04)], repeat=length):
            segments, advance = plainly(list(tokens))
            found = segments_of(tokens, TIMES)
            assert found.advance == (advance if advance > 0 else 3000)
            steps = [(round(s.start * 50), None if s.end is None else round(s.end * 50)) for s in found.segments]
            assert steps == [(start, end) for start, end, _ in segments]
            assert [list(s.tokens) for s in found.segments] == [
                [token for token in text if token < EOS] for *_, text in segments
            ]
            assert found.advance > 0
