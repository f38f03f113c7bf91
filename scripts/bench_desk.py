"""Measures a day on one device: somebody chats, an index grows, an agent works and an editor asks, in one server or in two.

    python scripts/bench_desk.py                              # two rounds, about 11 minutes
    python scripts/bench_desk.py --rounds 1 --day 15 --alone 6 --scale 5   # a minute, to see that it runs
    python scripts/bench_desk.py --peers shared=http://127.0.0.1:8000,http://127.0.0.1:8000 other=CHAT_URL,DOCUMENTS_URL

``shared`` is one ``staticllm serve`` with both models, ``separate`` two of them, one for each model: pipelines that do not
know each other. All run during the whole measurement, and rest while others have their turn: it begins when they have
measured the costs of their calls, which takes the processors from others. In each round every setup takes a turn, and each
round begins with another one. A turn is the reactive work alone, documents alone, agents alone, then all together: a chat
every 20 s, a completion every 5 s (both divided by ``--scale``), an index of paragraphs that grows all the time, and an agent
with 3 conversations. Documents and agents ask for ``service_tier`` "flex". ``--peers`` measures servers that run already, by
the names of their models. The package index has none of ollama's or llama.cpp's that would do: llama-cpp-cffi answers one
request at a time and does not embed, gpt4all has no server, llama-cpp-py-sync needs glibc 2.38.

Figures are over all rounds. "Alone" is without documents and agents: chats and completions are both reactive, and delay each
other (on a virtual clock, two prompts at once make the p95 of completions 2.5 times as long as without chats). A gap is the
time between two pieces of a streamed answer, where line breaks wait for what follows them, or at the server between two tokens;
its bound is 4 steps alone or 100 ms, whichever is longer (docs/scheduling.md), doubled while two prompts wait. Documents and
agents are rates until the day's end. What the device has left for agents is what neither documents nor reactive work take:
1 - documents / documents alone - reactive time, as the server's ``/metrics`` count the device time of reactive work alone. With a
large ``--scale`` reactive work alone may fill the device.

``--longest 5`` prints what the device of the chats ran in each of the 5 longest gaps, as ``/api/scheduler`` tells it; time
between calls is that of jobs, which are documents, or nobody's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
from bench_embedding_texts import texts
from bench_machine import this_machine
from make_bench_model import cache_dir
from real_models import fetch

CHAT_SECONDS, COMPLETION_SECONDS = 20.0, 5.0
CHAT_TOKENS, COMPLETION_TOKENS, AGENT_TOKENS = 64, 16, 80
CONVERSATIONS, TURNS = 3, 3
NUM_PARAGRAPHS, BATCH = 2000, 64
SECONDS_TO_START = 120
REST_SECONDS, IS_RESTING = 2.0, 0.05
READ_SECONDS = 2.0
FLEX = {"service_tier": "flex"}
MIN_BOUND = 0.1
NUM_BOUND_STEPS = 4


@dataclass(frozen=True)
class Setup:
    """A server for chats and one for documents, which may be the same, and the names of their models."""

    chat_url: str
    documents_url: str
    chat: str = "chat"
    documents: str = "documents"


@dataclass
class Notes:
    """What one kind of work found, in seconds: times to the first piece, the moments of each two pieces that follow one another;
    tokens or texts, and their time."""

    ttfts: list[float] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    amount: float = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.amount / self.seconds if self.seconds else 0.0

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in self.spans]

    def add(self, other: Notes) -> None:
        self.ttfts += other.ttfts
        self.spans += other.spans
        self.amount += other.amount
        self.seconds += other.seconds


Work = Callable[[Setup, float, argparse.Namespace, int], Notes]
"""Works on a setup until a moment (``time.perf_counter``), with texts of a seed."""


def main() -> None:
    options = arguments()
    with ExitStack() as stack:
        setups = {name: Setup(*urls.split(",")) for name, urls in (peer.split("=", 1) for peer in options.peers)}
        if not setups:
            setups = started(stack, options)
        wait_until_quiet(options.idle)
        reading = stack.enter_context(ExitStack())
        logs = {name: reading.enter_context(feed_of(setup)) for name, setup in setups.items()}
        found: dict[tuple[str, str], Notes] = {}
        for number in range(options.rounds):
            names = list(setups)
            first = number % len(names)
            for name in [*names[first:], *names[:first]]:
                for kind, notes in turn(setups[name], options, seed=number).items():
                    found.setdefault((name, kind), Notes()).add(notes)
        reading.close()
    for name, log in logs.items():
        for when in ("alone", "together"):
            found[name, f"reactive {when}"].spans = log.gaps_within(found[name, f"reactive {when}"].spans)
    report(list(setups), found, options)
    for name, log in logs.items():
        reactive = [found[name, f"{kind} together"] for kind in REACTIVE]
        longest = sorted((span for each in reactive for span in each.spans), key=lambda span: span[0] - span[1])
        for span in longest[: options.longest]:
            print(f"\n{name}, {1e3 * (span[1] - span[0]):.0f} ms:", *log.during(span), sep="\n  ")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--day", type=float, default=60.0, help="seconds of reactive work alone, and of all work together  [60]"
    )
    parser.add_argument("--alone", type=float, default=15.0, help="seconds of documents and of agents alone  [15]")
    parser.add_argument("--scale", type=float, default=1.0, help="how much faster the clock of chats runs  [1]")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds for servers to measure costs  [60]")
    parser.add_argument("--encoder", type=Path, default=cache_dir() / "minilm", help="make_bench_encoder.py makes it")
    parser.add_argument("--longest", type=int, default=0, metavar="N", help="what ran in the N longest gaps  [0]")
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--peers", nargs="+", default=[], metavar="NAME=CHAT_URL,DOCUMENTS_URL[,CHAT,DOCUMENTS]")
    options = parser.parse_args()
    if not options.peers and not options.encoder.is_dir():
        sys.exit(f"no encoder at {options.encoder}: python scripts/make_bench_encoder.py")
    return options


def started(stack: ExitStack, options: argparse.Namespace) -> dict[str, Setup]:
    """Start the servers of both setups, and wait until their models run."""
    chat, documents = f"chat={fetch('smollm2')}", f"documents={options.encoder}"
    shared = stack.enter_context(serving(options.device, chat, documents))
    one, other = (stack.enter_context(serving(options.device, model)) for model in (chat, documents))
    setups = {"shared": Setup(shared, shared), "separate": Setup(one, other)}
    for setup in setups.values():
        turn_into_use(setup)
    return setups


@contextmanager
def serving(device: str, *models: str) -> Iterator[str]:
    """Run a server with models as a process, and yield its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "staticllm", "serve", *models, "--device", device, "--port", str(port)]
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            wait_until_healthy(url, process)
            yield url
        finally:
            process.terminate()


def wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < until and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=10).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    sys.exit(f"no server at {url} after {SECONDS_TO_START} s, or it ended with {process.poll()}")


def wait_until_quiet(seconds: float) -> None:
    """Wait until the servers that were started here use less than a twentieth of a processor, at most so many seconds."""
    until = time.monotonic() + seconds
    servers = psutil.Process().children(recursive=True)
    used = processor_seconds(servers)
    while time.monotonic() < until:
        time.sleep(REST_SECONDS)
        before = used
        used = processor_seconds(servers)
        if used - before < IS_RESTING * REST_SECONDS:
            return
    if servers:
        print(f"the servers still measure costs after {seconds:.0f} s", file=sys.stderr)


def processor_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


class Feed:
    """What the server tells of the chat model's calls and ended answers, with moments of this process."""

    def __init__(self, setup: Setup) -> None:
        self._url = f"{setup.chat_url}/api/scheduler"
        self._shifts: list[float] = []
        self._calls: list[dict[str, Any]] = []
        self._ended: list[dict[str, Any]] = []
        self._cursor = 0

    def read(self) -> bool:
        """Take what is new; return whether the server tells anything."""
        answer = httpx.get(self._url, params={"after": self._cursor}, timeout=30)
        if answer.status_code != 200:
            return False
        told = answer.json()
        self._shifts.append(time.perf_counter() - told["now"])
        self._cursor = told["cursor"]
        self._calls += told["calls"]
        self._ended += told["ended"]
        return True

    @property
    def _shift(self) -> float:
        return min(self._shifts)  # the fastest answer tells the time best

    def gaps_within(self, times: list[tuple[float, float]]) -> list[tuple[float, float]]:
        """Return the longest gap of each reactive answer that ended within some times."""
        found = []
        for answer in self._ended:
            if answer["class"] == "reactive" and answer["longest_gap_ms"] is not None:
                end = answer["end"] + self._shift
                if any(begin <= end <= until for begin, until in times):
                    found.append((end, end + answer["longest_gap_ms"] / 1e3))
        return found

    def during(self, span: tuple[float, float]) -> Iterator[str]:
        """Describe the calls that overlap a time, in ms after its begin."""
        for call in self._calls:
            begin = call["start"] + self._shift
            end = begin + call["ms"] / 1e3
            if end > span[0] and begin < span[1]:
                prompts = ", ".join(f"{rows} of prompt {number}" for number, rows in call["prefill"]) or "no prompt"
                held = f"{call['rows']} rows, {len(call['decode'])} decode, {call['proactive']} proactive"
                gap = f"{call['waiting']} wait, {call['gap_ms'] or 0:.0f} ms after the token before"
                yield f"{1e3 * (begin - span[0]):.0f} to {1e3 * (end - span[0]):.0f}: {held}; {prompts}; {gap}"


@contextmanager
def feed_of(setup: Setup) -> Iterator[Feed]:
    """Read the feed of a server in a thread for the time of a block."""
    feed = Feed(setup)
    is_over = threading.Event()

    def read() -> None:
        while not is_over.wait(READ_SECONDS) and feed.read():
            pass

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read)
        try:
            yield feed
        finally:
            is_over.set()
            reader.result()


def turn_into_use(setup: Setup) -> None:
    """Load both models."""
    embed(setup, ["a text"])
    stream(setup, "/v1/completions", {"prompt": "A word", "max_tokens": 2})


def turn(setup: Setup, options: argparse.Namespace, seed: int) -> dict[str, Notes]:
    """Run the reactive work alone, the other kinds each alone, then all together; return what each found, by its name."""
    found = {}
    before = reactive_seconds(setup)
    begin = time.perf_counter()
    for kind, notes in together(REACTIVE, setup, begin + options.day, options, 10 * seed).items():
        found[f"{kind} alone"] = notes
    used = reactive_seconds(setup) - before
    found["reactive alone"] = Notes(
        amount=used, seconds=time.perf_counter() - begin, spans=[(begin, time.perf_counter())]
    )
    for kind, work in PROACTIVE.items():
        found[f"{kind} alone"] = work(setup, time.perf_counter() + options.alone, options, 10 * seed)
    all_works = {**REACTIVE, **PROACTIVE}
    begin = time.perf_counter()
    for kind, notes in together(all_works, setup, time.perf_counter() + options.day, options, 10 * seed + 5).items():
        found[f"{kind} together"] = notes
    found["reactive together"] = Notes(spans=[(begin, time.perf_counter())])
    return found


def together(
    works: dict[str, Work], setup: Setup, until: float, options: argparse.Namespace, seed: int
) -> dict[str, Notes]:
    """Run several kinds of work in threads. Raises what one of them raised, after all have ended."""
    with ThreadPoolExecutor(len(works)) as pool:
        futures = {kind: pool.submit(work, setup, until, options, seed) for kind, work in works.items()}
    return {kind: future.result() for kind, future in futures.items()}


def reactive_seconds(setup: Setup) -> float:
    """Return the device time of reactive requests since the chat model was loaded, s; 0 if the server does not tell."""
    answer = httpx.get(f"{setup.chat_url}/metrics", timeout=30)
    wanted = "staticllm_class_seconds_total{"
    lines = [line for line in answer.text.splitlines() if line.startswith(wanted) and '"reactive"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def chats(setup: Setup, until: float, options: argparse.Namespace, seed: int) -> Notes:
    """Ask a question about a few paragraphs every 20 s."""

    def ask(number: int) -> Notes:
        prompt = "What do these paragraphs say?\n\n" + "\n".join(texts(3, 100 * seed + number))
        return stream(setup, "/v1/chat/completions", {"messages": user(prompt), "max_tokens": CHAT_TOKENS})

    return every(CHAT_SECONDS / options.scale, until, ask)


def completions(setup: Setup, until: float, options: argparse.Namespace, seed: int) -> Notes:
    """Continue a text every 5 s, as an editor does."""

    def ask(number: int) -> Notes:
        prompt = " ".join(texts(2, 100 * seed + 50 + number))
        return stream(setup, "/v1/completions", {"prompt": prompt, "max_tokens": COMPLETION_TOKENS})

    return every(COMPLETION_SECONDS / options.scale, until, ask)


def every(seconds: float, until: float, ask: Callable[[int], Notes]) -> Notes:
    """Ask at the beginning of each interval, or at once if the answer before took longer."""
    found = Notes()
    begin = time.perf_counter()
    for number in itertools.count():
        moment = begin + number * seconds
        if max(moment, time.perf_counter()) >= until:
            return found
        time.sleep(max(0.0, moment - time.perf_counter()))
        found.add(ask(number))
    raise AssertionError("unreachable")


def index(setup: Setup, until: float, options: argparse.Namespace, seed: int) -> Notes:
    """Embed paragraphs, one request after another; after the last one, the first one again."""
    paragraphs = texts(NUM_PARAGRAPHS, seed)
    found = Notes()
    begin = time.perf_counter()
    parts = itertools.cycle(paragraphs[start : start + BATCH] for start in range(0, NUM_PARAGRAPHS, BATCH))
    while time.perf_counter() < until:
        part = next(parts)
        embed(setup, part)
        found.amount += len(part)
    found.seconds = time.perf_counter() - begin
    return found


def agents(setup: Setup, until: float, options: argparse.Namespace, seed: int) -> Notes:
    """Hold conversations side by side, each of a few turns, then another."""
    found = [Notes() for _ in range(CONVERSATIONS)]
    begin = time.perf_counter()

    def work(place: int) -> None:
        for number in itertools.count():
            messages: list[dict[str, str]] = []
            for turn in range(TURNS):
                if time.perf_counter() >= until:
                    return
                (paragraph,) = texts(1, 1000 * seed + 100 * place + 10 * number + turn)
                messages += user(f"Explain this: {paragraph}")
                body = {"messages": messages, "max_tokens": AGENT_TOKENS, **FLEX}
                text: list[str] = []
                found[place].add(stream(setup, "/v1/chat/completions", body, text))
                messages.append({"role": "assistant", "content": "".join(text)})

    with ThreadPoolExecutor(CONVERSATIONS) as pool:
        list(pool.map(work, range(CONVERSATIONS)))
    return Notes(amount=sum(each.amount for each in found), seconds=time.perf_counter() - begin)


REACTIVE: dict[str, Work] = {"chats": chats, "completions": completions}
PROACTIVE: dict[str, Work] = {"documents": index, "agents": agents}


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def embed(setup: Setup, part: list[str]) -> None:
    body = {"model": setup.documents, "input": part, "encoding_format": "base64", **FLEX}
    answer = httpx.post(f"{setup.documents_url}/v1/embeddings", json=body, timeout=300)
    if answer.status_code != 200:
        sys.exit(f"{setup.documents_url} refuses: {answer.text[:200]}")


def stream(setup: Setup, path: str, body: dict[str, Any], text: list[str] | None = None) -> Notes:
    """Return the times of a greedy answer, and the number of its tokens; append its pieces to ``text``."""
    more = {"model": setup.chat, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    times: list[float] = []
    found = Notes()
    begin = time.perf_counter()
    with httpx.stream("POST", setup.chat_url + path, json={**more, **body}, timeout=300) as answer:
        if answer.status_code != 200:
            sys.exit(f"{setup.chat_url} refuses: {answer.read()[:200]!r}")
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            found.amount = (chunk.get("usage") or {}).get("completion_tokens", found.amount)
            if chunk["choices"] and (piece := piece_of(chunk["choices"][0])):
                times.append(time.perf_counter())
                if text is not None:
                    text.append(piece)
    found.seconds = time.perf_counter() - begin
    found.ttfts = [times[0] - begin] if times else []
    found.spans = list(pairwise(times))
    return found


def piece_of(choice: dict[str, Any]) -> str:
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


def report(setups: list[str], found: dict[tuple[str, str], Notes], options: argparse.Namespace) -> None:
    print(
        f"{options.rounds} rounds of {options.day:.0f} s, chats {options.scale:g} times as often; {this_machine().line}"
    )
    print(f"load of the machine after the run: {os.getloadavg()[0]:.1f}\n")
    print("| | " + " | ".join(setups) + " |\n|---" * 1 + "|---" * len(setups) + "|")
    rows = {name: figures({kind: notes for (of, kind), notes in found.items() if of == name}) for name in setups}
    for label in rows[setups[0]]:
        print(f"| {label} | " + " | ".join(rows[name][label] for name in setups) + " |")


def figures(notes: dict[str, Notes]) -> dict[str, str]:
    """Return the figures of a setup, by their names."""
    shown = {}
    for kind in REACTIVE:
        alone, day = notes[f"{kind} alone"].ttfts, notes[f"{kind} together"].ttfts
        for share in (50, 95):
            ttft, later = quantile(alone, share), quantile(day, share)
            label = f"TTFT of {kind}, p{share}, ms: alone, together, ratio"
            shown[label] = f"{1e3 * ttft:.0f}, {1e3 * later:.0f}, {later / ttft:.2f}"
        shown[f"number of {kind}: alone, together"] = f"{len(alone)}, {len(day)}"
    step = quantile(notes["chats alone"].gaps, 50)
    bound = max(MIN_BOUND, NUM_BOUND_STEPS * step)
    before, gaps = (notes[f"chats {when}"].gaps + notes[f"completions {when}"].gaps for when in ("alone", "together"))
    shown["longest gap, ms: alone, together, bound"] = (
        f"{1e3 * max(before):.0f}, {1e3 * max(gaps):.0f}, {1e3 * bound:.0f}"
    )
    for when, found in (("alone", before), ("together", gaps)):
        shown[f"gaps above the bound, {when}"] = f"{sum(gap > bound for gap in found)} of {len(found)}"
    server = [notes[f"reactive {when}"].gaps for when in ("alone", "together")]
    if all(server):
        above = ", ".join(f"{sum(gap > bound for gap in each)} of {len(each)}" for each in server)
        shown["longest gap at the server, ms: alone, together"] = ", ".join(f"{1e3 * max(each):.0f}" for each in server)
        shown["answers with a gap above the bound at the server: alone, together"] = above
    kept = {kind: notes[f"{kind} together"].rate / notes[f"{kind} alone"].rate for kind in PROACTIVE}
    for kind, unit in (("documents", "documents"), ("agents", "tokens of agents")):
        rates = [notes[f"{kind} {when}"].rate for when in ("alone", "together")]
        shown[f"{unit} per second: alone, together, ratio"] = f"{rates[0]:.1f}, {rates[1]:.1f}, {kept[kind]:.2f}"
    reactive = notes["reactive alone"].rate
    left = 1 - kept["documents"] - reactive
    shown["share of the device of reactive work alone"] = f"{reactive:.2f}"
    shown["agents of what documents and reactive work leave"] = f"{kept['agents'] / left:.2f}" if left > 0.05 else "-"
    return shown


def quantile(values: list[float], percent: int) -> float:
    """Return a quantile of values; NaN of none."""
    if len(values) < 2:
        return values[0] if values else float("nan")
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


if __name__ == "__main__":
    main()
