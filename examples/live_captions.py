"""Captions of what the microphone hears: python live_captions.py MODEL_DIR [--file RECORDING]. Ctrl-C ends it.

It needs staticllm[speech,examples], and on Linux PortAudio. Once a second, the model transcribes the sentence so far again. A
word settles when two texts in turn have it at the same place, or when the speaker pauses; it never changes then. Others are grey.
"""

import argparse
import contextlib
import queue
import shutil
import sys
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any

import numpy as np

from staticllm import StaticWhisperPipeline
from staticllm.pipelines.speech.audio import RATE, read_audio
from staticllm.pipelines.speech.voice import FRAME, speech_intervals, speech_windows, voice_detector

STEP = 32 * FRAME  # samples between two texts of a sentence
PAUSE, LONGEST, KEPT = int(0.4 * RATE), 25 * RATE, RATE // 2  # samples
SECONDS_TO_WAIT = 5


def microphone(device: str | None) -> Iterator[np.ndarray]:
    """Yield what was heard since the last call, at least ``STEP`` samples."""
    import sounddevice

    heard: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()

    def note(block: np.ndarray, *rest: object) -> None:
        heard.put(block[:, 0].copy())

    with sounddevice.InputStream(RATE, device=device, channels=1, dtype="float32", callback=note):
        while True:
            parts: list[np.ndarray] = []
            while sum(map(len, parts)) < STEP or not heard.empty():
                parts.append(heard.get(timeout=SECONDS_TO_WAIT))
            yield np.concatenate(parts)


def recorded(path: str) -> Iterator[np.ndarray]:
    samples = read_audio(path)
    yield from (samples[start : start + STEP] for start in range(0, len(samples), STEP))


def words_of(text: str) -> list[str]:
    return "".join(sign if sign.isprintable() else " " for sign in text).split()


class Screen:
    """Writes captions: on a terminal in a line whose end may change, else each word once, when it settles."""

    def __init__(self) -> None:
        self.is_terminal, self.num_written = sys.stdout.isatty(), 0

    def show(self, settled: list[str], rest: list[str]) -> None:
        if self.is_terminal:
            line = " ".join([*settled, *rest])[1 - shutil.get_terminal_size().columns :]
            end = max(0, len(line) - len(" ".join(rest)))
            print(f"\r\x1b[K{line[:end]}\x1b[90m{line[end:]}\x1b[0m", end="", flush=True)
        else:
            print(*settled[self.num_written :], "", sep=" ", end="", flush=True)
        self.num_written = len(settled)

    def end(self, settled: list[str]) -> None:
        print("\r\x1b[K" + " ".join(settled) if self.is_terminal else " ".join(settled[self.num_written :]), flush=True)
        self.num_written = 0


class Captions:
    """Turns blocks of samples into sentences, with one transcription at a time. ``voice``: probability of speech per frame."""

    def __init__(self, pipe: StaticWhisperPipeline, detect: Callable[..., Any], screen: Any, **options: Any) -> None:
        self.pipe, self.detect, self.screen, self.options = pipe, detect, screen, options
        self.samples, self.voice = np.zeros(0, np.float32), np.zeros(0, np.float32)
        self.settled, self.guess = list[str](), list[str]()  # words that stay, and those of the last text

    def hear(self, block: np.ndarray) -> None:
        self.samples = np.concatenate([self.samples, block])
        num_known, num_frames = len(self.voice), len(self.samples) // FRAME
        self.voice = np.concatenate([self.voice, self.detect(self.samples[num_known * FRAME : num_frames * FRAME])])
        while intervals := speech_intervals(self.voice, len(self.samples)):
            window = speech_windows(intervals[:1], self.voice, LONGEST)[0]
            if window.end == intervals[0].end and len(self.samples) - window.end < PAUSE:
                return self.guess_again(window.start, window.end)
            self.settle(window.start, window.end)
        return self.forget(len(self.samples) - KEPT)

    def guess_again(self, start: int, end: int) -> None:
        words = self.transcribed(start, end)
        agreed = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(words[:-1], self.guess, strict=False)))
        self.settled += words[len(self.settled) : agreed]
        self.guess = words
        self.screen.show(self.settled, words[len(self.settled) :])

    def settle(self, start: int, end: int) -> None:
        words = self.transcribed(start, end)
        self.screen.end(self.settled + words[len(self.settled) :])
        self.settled, self.guess = [], []
        self.forget(end)

    def finish(self) -> None:
        if self.guess:
            self.settle(0, len(self.samples))

    def transcribed(self, start: int, end: int) -> list[str]:
        text = ""

        def show(piece: str) -> None:
            nonlocal text
            text += piece
            self.screen.show(self.settled, words_of(text)[len(self.settled) :])

        return words_of(str(self.pipe.submit(self.samples[start:end], on_text=show, **self.options).result()))

    def forget(self, num_samples: int) -> None:
        num_frames = max(0, num_samples) // FRAME
        self.samples, self.voice = self.samples[num_frames * FRAME :], self.voice[num_frames:]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--language", help="a code such as de; else the model detects it")
    parser.add_argument("--microphone", metavar="NAME", help="else the first one (python -m sounddevice lists them)")
    parser.add_argument("--file", help="a recording in place of the microphone")
    options = parser.parse_args()
    blocks = recorded(options.file) if options.file else microphone(options.microphone)
    try:
        with StaticWhisperPipeline(options.model, options.device) as pipe:
            captions = Captions(pipe, voice_detector(), Screen(), language=options.language)
            with contextlib.suppress(KeyboardInterrupt):
                for block in blocks:
                    captions.hear(block)
            captions.finish()
    except queue.Empty:
        sys.exit(f"the microphone has been silent for {SECONDS_TO_WAIT} s: is it still there?")
    except Exception as error:  # PortAudioError is one, too
        sys.exit(" ".join(str(error).split())[:400])


if __name__ == "__main__":
    main()
