"""Measures how fast Whisper tiny.en writes what is said, beside GenAI's pipeline and faster-whisper, in turns.

    python scripts/real_whisper.py && python scripts/bench_speech.py                 # three rounds of a recording of 5 minutes
    python scripts/bench_speech.py --minutes 10 --rounds 3 --peers ours genai
    STATICLLM_PEERS_PYTHON=… python scripts/bench_speech.py --peers ours genai faster-whisper
    python scripts/bench_speech.py --beside-chat                     # a chat on the same device, which streams all the time

The recording repeats what the distribution's package pocketsphinx-testdata has. Figures are medians over rounds: how many seconds
of speech are written in one second (1 / real-time factor), for one recording, and for four at once and one after another.
"packed" cuts a recording where there is silence and takes four windows of it together, as faster-whisper's batched pipeline does.
faster-whisper runs in the environment of ``STATICLLM_PEERS_PYTHON`` with its defaults on a CPU (int8), greedy like the others.
whisper.cpp (package pywhispercpp) runs in the same one, with weights in f16.
``--beside-chat``: SmolLM2 and Whisper share an engine; a recording of 60 s is written alone, and while answers of 128 tokens
stream one after another. A gap is the time between two tokens, as the engine recorded it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import wave
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from bench_machine import this_machine
from numpy.typing import NDArray
from real_models import fetch
from real_whisper import is_whole, place

RECORDINGS = Path("/usr/share/pocketsphinx/test/data/librivox")
RATE = 16000
FOUR_SECONDS = 60.0
"""The length of each of four recordings, seconds."""
Transcribe = Callable[[NDArray[np.float32]], str]
PEER = """
import json, sys, numpy as np
from faster_whisper import BatchedInferencePipeline, WhisperModel
model = WhisperModel(sys.argv[1], device="cpu", cpu_threads=int(sys.argv[2]), compute_type="int8")
batch = int(sys.argv[3])
transcribe = BatchedInferencePipeline(model).transcribe if batch else model.transcribe
more = {"batch_size": batch} if batch else {"condition_on_previous_text": False}
for line in sys.stdin:
    segments, _ = transcribe(np.load(json.loads(line)), beam_size=1, **more)
    print(json.dumps("".join(each.text for each in segments)), flush=True)
"""
PEER_CPP = """
import json, sys, numpy as np
from pywhispercpp.model import Model
quiet = dict(print_progress=False, print_realtime=False, redirect_whispercpp_logs_to=None)
model = Model(sys.argv[1], n_threads=int(sys.argv[2]), **quiet)
for line in sys.stdin:
    found = model.transcribe(np.load(json.loads(line)))
    print(json.dumps(" ".join(each.text for each in found)), flush=True)
"""


def main() -> None:
    options = arguments()
    if not is_whole():
        sys.exit("no Whisper tiny.en: python scripts/real_whisper.py")
    if not RECORDINGS.is_dir():
        sys.exit(f"no {RECORDINGS}: install the distribution's package pocketsphinx-testdata")
    if options.beside_chat:
        beside_chat(recording(FOUR_SECONDS), options.rounds)
        return
    long = recording(60 * options.minutes)
    four = recording(FOUR_SECONDS)
    with ExitStack() as stack:
        peers = {name: stack.enter_context(PEERS[name]()) for name in options.peers}
        for transcribe in peers.values():
            transcribe(four[: 10 * RATE])
        found: dict[tuple[str, str], list[float]] = {}
        texts: dict[str, str] = {}
        for number in range(options.rounds):
            names = options.peers[number % len(peers) :] + options.peers[: number % len(peers)]
            for name in names:
                turn(name, peers[name], long, four, found, texts)
    report(options, found, texts)


def turn(
    name: str,
    transcribe: Transcribe,
    long: NDArray[np.float32],
    four: NDArray[np.float32],
    found: dict[tuple[str, str], list[float]],
    texts: dict[str, str],
) -> None:
    """Time one peer, and add what it found."""
    seconds, texts[name] = timed(lambda: transcribe(long))
    found.setdefault((name, "one"), []).append(len(long) / RATE / seconds)
    seconds, _ = timed(lambda: [transcribe(four) for _ in range(4)])
    found.setdefault((name, "four, one after another"), []).append(4 * FOUR_SECONDS / seconds)
    if name == "ours":
        seconds, _ = timed(lambda: at_once(transcribe, four))
        found.setdefault((name, "four at once"), []).append(4 * FOUR_SECONDS / seconds)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=["ours", "genai"])
    parser.add_argument(
        "--beside-chat", action="store_true", help="time a recording beside a chat, and the chat's gaps"
    )
    return parser.parse_args()


def beside_chat(samples: NDArray[np.float32], rounds: int) -> None:
    """Print how fast a recording is written alone and beside a chat on the same device, and the gaps of the chat."""
    from staticllm import StaticLLMPipeline, StaticWhisperPipeline

    with (
        StaticLLMPipeline(fetch("smollm2"), "CPU") as chat,
        StaticWhisperPipeline(place() / "stateful", "CPU", engine=chat.engine) as speech,
    ):
        chat.wait_until_complete()
        speech.generate(samples[: 10 * RATE])
        alone, beside, gaps = [], [], {"alone": list[float](), "beside": list[float]()}
        answer = partial(chat.generate, max_new_tokens=128, ignore_eos=True, do_sample=False)
        for number in range(rounds):
            gaps["alone"] += gaps_of(answer(f"Tell me about the number {number}."))
            alone.append(timed(lambda: speech.generate(samples))[0])
            with ThreadPoolExecutor(1) as pool:
                written = pool.submit(timed, lambda: speech.generate(samples))
                for again in itertools.count():
                    if written.done():
                        break
                    gaps["beside"] += gaps_of(answer(f"Tell me about the numbers {number} and {again}."))
                beside.append(written.result()[0])
    share = statistics.median(one / other for one, other in zip(alone, beside, strict=True))
    print(f"{rounds} rounds; {this_machine().line}")
    print(
        f"60 s of speech: {statistics.median(alone):.1f} s alone, {statistics.median(beside):.1f} s beside a chat, {share:.2f}"
    )
    for name, found in gaps.items():
        shown = f"median {statistics.median(found):.1f}, longest {max(found):.0f} of {len(found)}"
        print(f"gaps of the chat {name}, ms: {shown}")


def gaps_of(result: Any) -> list[float]:
    """Return the times between the tokens of an answer, ms."""
    return [after - before for before, after in pairwise(result.perf_metrics.raw_metrics.m_new_token_times)]


def recording(seconds: float) -> NDArray[np.float32]:
    """Return recorded speech ``[n]``, repeated until it is long enough."""
    clips = []
    for path in sorted(RECORDINGS.glob("*.wav")):
        with wave.open(str(path)) as file:
            clips.append(
                np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / np.float32(32768)
            )
    once = np.concatenate(clips)
    length = int(seconds * RATE)
    return np.tile(once, -(-length // len(once)))[:length]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    found = work()
    return time.perf_counter() - begin, found


def at_once(transcribe: Transcribe, samples: NDArray[np.float32]) -> list[str]:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(transcribe, [samples] * 4))


@contextmanager
def ours(num_windows: int | None = None) -> Iterator[Transcribe]:
    from staticllm import StaticWhisperPipeline

    with StaticWhisperPipeline(place() / "stateful", "CPU") as pipe:
        yield lambda samples: str(pipe.generate(samples, parallel_windows=num_windows))


@contextmanager
def of_genai() -> Iterator[Transcribe]:
    import openvino_genai as genai

    pipe = genai.WhisperPipeline(str(place() / "stateful"), "CPU")
    yield lambda samples: str(pipe.generate(samples))


def faster_whisper(batch: int = 0) -> AbstractContextManager[Transcribe]:
    """Run faster-whisper, one window after another or in batches."""
    return in_child(PEER, str(fetch("whisper")), str(os.cpu_count() or 1), str(batch))


def whisper_cpp() -> AbstractContextManager[Transcribe]:
    """Run whisper.cpp, whose model is written once."""
    file = place().with_name(f"{place().name}.ggml")
    if not file.is_file():
        here = Path(__file__).resolve().parent
        subprocess.run([peers_python(), here / "whisper_ggml.py", place() / "original", file], check=True)
    return in_child(PEER_CPP, str(file), str(os.cpu_count() or 1))


def peers_python() -> str:
    """Return the Python of the environment of other engines."""
    return os.environ.get("STATICLLM_PEERS_PYTHON", sys.executable)


@contextmanager
def in_child(program: str, *arguments: str) -> Iterator[Transcribe]:
    """Run a peer in its own environment, with a line of JSON per recording."""
    command = [peers_python(), "-c", program, *arguments]
    with (
        tempfile.TemporaryDirectory() as scratch,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child,
    ):
        stdin, stdout = child.stdin, child.stdout
        assert stdin is not None and stdout is not None

        def transcribe(samples: NDArray[np.float32]) -> str:
            path = Path(scratch) / "samples.npy"
            np.save(path, samples)
            print(json.dumps(str(path)), file=stdin, flush=True)
            return str(json.loads(stdout.readline()))

        yield transcribe
        stdin.close()


PACKED = 4
PEERS: dict[str, Callable[[], AbstractContextManager[Transcribe]]] = {
    "ours": ours,
    "genai": of_genai,
    "faster-whisper": faster_whisper,
    "ours packed": partial(ours, PACKED),
    "faster-whisper packed": partial(faster_whisper, PACKED),
    "whisper.cpp": whisper_cpp,
}


def report(options: argparse.Namespace, found: dict[tuple[str, str], list[float]], texts: dict[str, str]) -> None:
    print(f"{options.rounds} rounds, {options.minutes:g} minutes; {this_machine().line}")
    print(f"load of the machine after the run: {os.getloadavg()[0]:.1f}\n")
    print(
        "| seconds of speech per second | " + " | ".join(options.peers) + " |\n|---" + "|---" * len(options.peers) + "|"
    )
    for what in ("one", "four, one after another", "four at once"):
        cells = [
            f"{statistics.median(found[name, what]):.1f}" if (name, what) in found else "-" for name in options.peers
        ]
        print(f"| {what} | " + " | ".join(cells) + " |")
    if {"ours", "genai"} <= set(texts):
        print(f"\nthe same text as GenAI's: {texts['ours'] == texts['genai']}")


if __name__ == "__main__":
    main()
