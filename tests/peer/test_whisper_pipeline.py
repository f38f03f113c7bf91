"""Compares StaticWhisperPipeline with GenAI's class in f32, on Whisper tiny.en: text, times, results, streams.

The model is made by `scripts/real_whisper.py`, which takes half a minute; the speech is that of the distribution's package
`pocketsphinx-testdata`, and what espeak-ng says. Three models with random weights are made where STATICLLM_EXPORT_PYTHON names
an environment for exports; `staticllm export --setup` makes one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import wave
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openvino_genai as genai
import pytest

from staticllm import StaticWhisperPipeline
from staticllm.errors import ClosedError, GenerationConfigError, ModelError, PromptError

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from real_whisper import is_whole, place

RANDOM_WHISPER = Path(__file__).resolve().parents[1] / "support" / "export" / "random_whisper.py"
RECORDINGS = Path("/usr/share/pocketsphinx/test/data/librivox")
RATE = 16000
F32 = {"INFERENCE_PRECISION_HINT": "f32"}
SENTENCES = (
    "The quick brown fox jumps over the lazy dog.", "Please open the second window on the left side.",
    "There are seventeen apples and forty two pears in the basket.", "I will meet you at half past nine tomorrow morning.",
    "Could you turn down the volume of the radio?", "The train to London leaves from platform four.",
    "She sells sea shells by the sea shore.", "My telephone number is five five five, one two three four.",
    "It has been raining since last Thursday.", "A journey of a thousand miles begins with a single step.",
    "He read the whole book in one evening.", "Where did you put the keys of the car?",
)  # fmt: skip
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_whole(), reason="no Whisper tiny.en: python scripts/real_whisper.py"),
    pytest.mark.skipif(not RECORDINGS.is_dir(), reason=f"no {RECORDINGS}: pocketsphinx-testdata has it"),
]


@pytest.fixture(scope="module", params=["stateful", "three_files"])
def ours(request):
    with StaticWhisperPipeline(place() / request.param, "CPU", **F32) as pipe:
        yield pipe


class Remembering:
    """GenAI's pipeline, which hears the same samples with the same options once."""

    def __init__(self, folder):
        self._pipe, self._known = genai.WhisperPipeline(str(folder), "CPU", **F32), {}

    def generate(self, clip, **options):
        key = (clip.tobytes(), *sorted(options.items()))
        if key not in self._known:
            self._known[key] = self._pipe.generate(clip, **options)
        return self._known[key]


@pytest.fixture(scope="module")
def theirs():
    return Remembering(place() / "stateful")


def samples_of(path):
    with wave.open(str(path)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, RATE)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768


@pytest.fixture(scope="module")
def recorded():
    return [samples_of(path) for path in sorted(RECORDINGS.glob("*.wav"))]


@pytest.fixture(scope="module")
def clips(recorded, tmp_path_factory):
    """30 clips: recorded ones, spoken ones if espeak-ng is there, and mixtures of them with noise and pauses."""
    found = [*recorded]
    if shutil.which("espeak-ng"):
        folder = tmp_path_factory.mktemp("spoken")
        for number, sentence in enumerate(SENTENCES):
            path = folder / f"{number}.wav"
            subprocess.run(["espeak-ng", "-w", str(path), "-s", str(130 + 5 * number), sentence], check=True)
            found.append(at_16_khz(path))
    rng = np.random.default_rng(0)
    while len(found) < 30:
        first, second = rng.choice(len(found), 2, replace=False)
        pause = np.zeros(int(rng.integers(0, RATE)), np.float32)
        mixed = np.concatenate([found[first], pause, found[second]])[: 29 * RATE]
        found.append(mixed + rng.normal(0, 0.003, len(mixed)).astype(np.float32))
    return found


def at_16_khz(path):
    with wave.open(str(path)) as file:
        known = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768
        rate = file.getframerate()
    moments = np.arange(0, len(known) / rate, 1 / RATE)
    return np.interp(moments, np.arange(len(known)) / rate, known).astype(np.float32)


def chunks(result, clip):
    """Return the chunks of GenAI, none of which is later than the end of the clip."""
    last = len(clip) / RATE
    found = [] if result.chunks is None else result.chunks
    return [
        (pytest.approx(min(each.start_ts, last), abs=1e-3), pytest.approx(min(each.end_ts, last), abs=1e-3), each.text)
        for each in found
    ]


OPTIONS = [{}, {"return_timestamps": True}, {"initial_prompt": "Elinor Dashwood"}]


@pytest.mark.parametrize("place", range(len(OPTIONS)))
def test_thirty_clips_are_heard_as_by_genai(ours, theirs, clips, place):
    """Each clip with one of the options, because they take minutes; of the decoder without states, a fifth of them."""
    options = OPTIONS[place]
    has_states = ours.config.model_file == "openvino_decoder_model.xml"
    for number, clip in enumerate(clips[place :: len(OPTIONS) if has_states else 5 * len(OPTIONS)]):
        expected = theirs.generate(clip, **options)
        found = ours.generate(clip, **options)
        assert (number, str(found)) == (number, str(expected))
        assert [(each.start_ts, each.end_ts, each.text) for each in found.chunks or []] == chunks(expected, clip)
        assert (found.language, found.scores, len(found.texts)) == (expected.language, expected.scores, 1)


def test_long_recordings_and_many_at_once(ours, theirs, recorded):
    long = np.concatenate([*recorded, *recorded])
    expected = theirs.generate(long, return_timestamps=True)
    with ThreadPoolExecutor(6) as pool:
        results = [pool.submit(ours.generate, each, return_timestamps=True) for each in (*recorded, long)]
        found = results[-1].result()
        assert str(found) == str(expected)
        assert [(each.start_ts, each.end_ts, each.text) for each in found.chunks] == chunks(expected, long)
        for clip, result in zip(recorded, results, strict=False):
            assert str(result.result()) == str(theirs.generate(clip, return_timestamps=True))


def test_the_second_call_never_hears_the_first(ours, recorded, theirs):
    """The fault of openvino #37937, in the order that shows it: prompts are equal, so a cache would find the first one's."""
    expected = [str(theirs.generate(clip)) for clip in recorded]
    assert len(set(expected)) == len(recorded)
    for number in (0, 1, 0, 2, 3, 4, 1):
        assert str(ours.generate(recorded[number])) == expected[number]


def test_words_are_found_where_genai_finds_them(recorded):
    folder = place() / "stateful"
    theirs = genai.WhisperPipeline(str(folder), "CPU", word_timestamps=True, **F32)
    with StaticWhisperPipeline(folder, "CPU", word_timestamps=True, **F32) as pipe:
        for clip, options in (
            (recorded[0], {}),
            (recorded[1], {}),
            (np.concatenate(recorded * 2), {"return_timestamps": True}),
        ):
            expected = theirs.generate(clip, word_timestamps=True, **options)
            found = pipe.generate(clip, word_timestamps=True, **options)
            assert [each.word for each in found.words] == [each.word for each in expected.words]
            for mine, other in zip(found.words, expected.words, strict=True):
                assert (mine.start_ts, mine.end_ts) == pytest.approx((other.start_ts, other.end_ts), abs=0.021)
        assert pipe.generate(recorded[1], word_timestamps=False).words is None
        assert theirs.generate(recorded[1]).words
        found = pipe.generate(recorded[1])
        assert found.words, "the constructor's option is the default of calls"
        assert found.perf_metrics.get_num_generated_tokens()


def test_beams_are_those_of_genai(ours, theirs, recorded):
    for clip in recorded[:3]:
        for options in ({"num_beams": 4}, {"num_beams": 2, "return_timestamps": True}):
            expected = theirs.generate(clip, **options)
            found = ours.generate(clip, **options)
            assert str(found) == str(expected)
            assert [(each.start_ts, each.end_ts, each.text) for each in found.chunks or []] == chunks(expected, clip)


def test_streams_pass_the_text_and_may_stop(ours, recorded):
    text = []
    whole = str(ours.generate(recorded[0], streamer=text.append))
    assert "".join(text) == whole
    few = []

    def stop(piece):
        few.append(piece)
        return genai.StreamingStatus.STOP if len(few) == 3 else genai.StreamingStatus.RUNNING

    assert str(ours.generate(recorded[0], streamer=stop)) == "".join(few)

    def fail(piece):
        raise KeyError(piece)

    with pytest.raises(KeyError):
        ours.generate(recorded[0], streamer=fail)
    assert str(ours.generate(recorded[0])) == whole
    ours.engine.run_between_steps(lambda: None)
    assert ours.engine.runner.cache.cross.num_free == ours.engine.runner.cache.cross.num_cross_windows


def test_results_and_timings_have_genais_attributes(ours, theirs, recorded):
    expected = theirs.generate(recorded[1], return_timestamps=True)
    found = ours.generate(recorded[1], return_timestamps=True)
    for mine, other in (
        (found, expected),
        (found.chunks[0], expected.chunks[0]),
        (found.perf_metrics, expected.perf_metrics),
    ):
        assert {name for name in dir(other) if name[0] != "_"} <= set(dir(mine))
    assert found.perf_metrics.get_num_generated_tokens() == expected.perf_metrics.get_num_generated_tokens()
    assert found.perf_metrics.get_encode_inference_duration().mean > 0
    assert found.perf_metrics.get_detokenization_duration().mean > 0
    for metrics in (found.perf_metrics, expected.perf_metrics):
        assert metrics.get_tokenization_duration().mean == 0
    assert isinstance(found, genai.py_openvino_genai.WhisperDecodedResults)


BAD = (
    ([], {}, PromptError, "length 0"),
    ([0.0], {}, PromptError, "length 1"),
    ([float("nan")] * 500, {}, PromptError, "finite"),
    (np.zeros((2, 500), np.float32), {}, PromptError, "one channel"),
    (np.full(500, 9000, np.int16), {}, PromptError, "32768"),
    ("speech.wav", {}, PromptError, "read_audio"),
    (np.zeros(500, np.float32), {"language": "de"}, GenerationConfigError, "English only"),
    (np.zeros(500, np.float32), {"nothing": 1}, GenerationConfigError, "nothing"),
)


def test_bad_input_gets_one_line(ours, recorded):
    for speech, options, error, text in BAD:
        with pytest.raises(error, match=text) as found:
            ours.generate(speech, **options)
        assert "\n" not in str(found.value)
    assert str(ours.generate(recorded[1]))


def test_blob_sets_and_caches_hold_both_programs(recorded, theirs, tmp_path):
    folder, expected = place() / "stateful", str(theirs.generate(recorded[0]))
    events = []
    for _ in range(2):
        events.clear()
        with StaticWhisperPipeline(
            folder, "CPU", CACHE_DIR=str(tmp_path / "cache"), on_progress=events.append, **F32
        ) as pipe:
            assert str(pipe.generate(recorded[0])) == expected
    assert not [event for event in events if event.stage in ("read", "compile")], (
        "the second start imports both programs"
    )
    with StaticWhisperPipeline(folder, "CPU", BLOB_PATH=str(tmp_path / "set"), EXPORT_BLOB=True, **F32) as pipe:
        assert str(pipe.generate(recorded[0])) == expected
    assert {path.name for path in (tmp_path / "set").iterdir()} == {"encoder_model", "decoder_model"}
    with StaticWhisperPipeline(folder, "CPU", BLOB_PATH=str(tmp_path / "set"), **F32) as pipe:
        assert str(pipe.generate(recorded[0])) == expected


def test_a_folder_of_another_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match="no model directory"):
        StaticWhisperPipeline(tmp_path / "nothing")
    with pytest.raises(ModelError, match="is no speech model"):
        StaticWhisperPipeline(tmp_path)
    with StaticWhisperPipeline(place() / "stateful", "CPU", **F32) as pipe:
        pass
    with pytest.raises(ClosedError):
        pipe.generate(np.zeros(500, np.float32))


@pytest.fixture(scope="module")
def random_models(tmp_path_factory):
    """The folder of models with random weights: their shapes are those of tiny (multilingual), v3 (128 bands) and distil."""
    python = os.environ.get("STATICLLM_EXPORT_PYTHON")
    if python is None:
        pytest.skip("STATICLLM_EXPORT_PYTHON names no environment: `staticllm export --setup` makes one")
    target = tmp_path_factory.mktemp("random")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run(
        [python, str(RANDOM_WHISPER), str(place() / "original"), str(target)],
        check=True, timeout=900, env={**environment, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    return target


@pytest.mark.parametrize(("shape", "step"), [("tiny", 2), ("v3", 4), ("distil", 4)])
def test_clips_are_heard_as_by_genai_by_models_of_other_shapes(random_models, clips, shape, step):
    """Of recordings longer than a window, GenAI's last column of features is zero, and ours is not: these are shorter."""
    folder = random_models / shape
    theirs = Remembering(folder / "stateful")
    for form, heard in (("stateful", clips[::step]), ("three_files", clips[:: step * 15])):
        with StaticWhisperPipeline(folder / form, "CPU", **F32) as pipe:
            for options in ({}, {"num_beams": 3, "return_timestamps": True}):
                for index, clip in enumerate(heard):
                    expected = theirs.generate(clip, max_new_tokens=16, **options)
                    found = pipe.generate(clip, max_new_tokens=16, **options)
                    assert (form, index, str(found)) == (form, index, str(expected))
                    assert (found.language, found.scores) == (expected.language, expected.scores)
                    assert [(each.start_ts, each.end_ts, each.text) for each in found.chunks or []] == chunks(
                        expected, clip
                    )
