"""Tests when a window is decoded again."""

from __future__ import annotations

import math
import zlib

import pytest

from staticllm.pipelines.speech.fall_back import DecodedWindow, FallBackVerdict, compression_ratio, options_at, verdict
from staticllm.pipelines.speech.whisper_config import FallBackParams, WhisperGenerationConfig, whisper_options

VOCAB = 51865
REPEATED = [5, 6, 7, 8] * 50
VARIED = [(index * 7919) % 50000 for index in range(200)]
DEFAULTS = FallBackParams((0.0, 0.2), 2.4, -1.0, 0.6)


@pytest.mark.parametrize("vocab_size", [200, 256, 257, 51865, 65536, 70000])
def test_the_ratio_is_that_of_the_tokens_as_bytes(vocab_size):
    tokens = [index % min(vocab_size, 90) for index in range(60)]
    width = int(math.log2(vocab_size) / 8) + 1
    content = b"".join(token.to_bytes(width, "little") for token in tokens)
    assert compression_ratio(tokens, vocab_size) == len(content) / len(zlib.compress(content))


def test_no_tokens_have_a_small_ratio():
    assert compression_ratio([], VOCAB) == 0.0


@pytest.mark.parametrize(
    ("tokens", "mean", "no_speech", "params", "expected"),
    [
        (VARIED, -0.3, 0.0, DEFAULTS, FallBackVerdict.KEEP),
        (REPEATED, -0.3, 0.0, DEFAULTS, FallBackVerdict.AGAIN),
        (VARIED, -1.5, 0.0, DEFAULTS, FallBackVerdict.AGAIN),
        (VARIED, -1.5, 0.7, DEFAULTS, FallBackVerdict.SILENCE),
        (REPEATED, -1.5, 0.7, DEFAULTS, FallBackVerdict.SILENCE),
        (VARIED, -0.3, 0.7, DEFAULTS, FallBackVerdict.KEEP),
        (REPEATED, -0.3, 0.7, DEFAULTS, FallBackVerdict.AGAIN),
        (REPEATED, -9.0, 0.9, FallBackParams(), FallBackVerdict.KEEP),
        (VARIED, -0.3, 0.7, FallBackParams((), None, None, 0.6), FallBackVerdict.SILENCE),
        (VARIED, -0.3, 0.6, FallBackParams((), None, None, 0.6), FallBackVerdict.KEEP),
    ],
)
def test_verdicts(tokens, mean, no_speech, params, expected):
    assert verdict(DecodedWindow(tokens, [mean] * len(tokens), no_speech), params, VOCAB) is expected


def test_a_window_without_tokens():
    assert verdict(DecodedWindow([], []), DEFAULTS, VOCAB) is FallBackVerdict.KEEP


def test_beams_search_at_temperature_0_and_draw_at_others():
    config = WhisperGenerationConfig(is_multilingual=False, eos_token_id=50256, num_beams=3)
    options = whisper_options(config, {"temperature": (0.0, 0.4), "top_k": 5}).generation
    assert options_at(options, 0.0).beams is not None
    assert not options_at(options, 0.0).sampling.do_sample
    drawn = options_at(options, 0.4)
    assert drawn.beams is None
    assert (drawn.sampling.do_sample, drawn.sampling.temperature) == (True, 0.4)
