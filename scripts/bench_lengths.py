"""Compares staticllm with openvino_genai at the lengths, with the clients, and in the minute that people have.

    python scripts/bench_lengths.py                      # all rows, about an hour and a half on two cores
    python scripts/bench_lengths.py --rows clients --lengths 900 --clients 1 16 --rounds 3
    python scripts/bench_lengths.py --rows start --gguf model.gguf   # the first questions after a start, of a GGUF file

Rows of ``clients``: prompts of 64, 900 and 4000 tokens, all at once, and one every ``--every`` seconds; seconds until the last
answer, tokens per second, the median time to the first token, and the longest gap between two tokens of one answer. Rows of
``one``: the first token and the time between two, after 16 to 7000 tokens, alone. Rows of ``start``: five questions right after
loading, each in a process that has done nothing else. Rows of ``chat``: a conversation that grows to 8000 tokens; each turn is
passed with all before it.

The peers take turns; figures are medians over the rounds, ratios medians of those of each round, beside the setting of GenAI with
the best median of each row. Moments are those at which a token is there to be read: of ours when it is chosen, of GenAI's after
the step that made it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench_figures import BEST, Figure, Figures
from bench_machine import this_machine
from bench_workers import Batching, Genai, Ours, Peer, Worker, prompts_of
from make_bench_model import SHAPES, make

ROOT = Path(__file__).resolve().parent.parent
ROWS = ("one", "clients", "start", "chat")
ONE = (16, 1000, 4000, 7000)
NEW = {64: 96}
"""New tokens of each client, by the length of the prompts; 64 for all others."""
QUESTIONS, QUESTION, ANSWER = 5, 40, 64
TURN, REPLY, CONVERSATION = 400, 100, 8000
RATE = "tokens_per_second"
"""The one figure of which more is better; its rows begin with what ``bench_figures`` takes for a rate."""
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ours": ("ours", {}),
    "genai": ("genai", {}),
    "genai f32": ("genai", {"INFERENCE_PRECISION_HINT": "f32"}),
    "batching": ("batching", {}),
    "batching f32": ("batching", {"INFERENCE_PRECISION_HINT": "f32"}),
}


class TimedOurs(Ours):
    """StaticLLMPipeline, with the moments of all tokens of several clients."""

    def crowd(self, count: int, length: int, seed: int, every: float) -> dict[str, Any]:
        begin = time.perf_counter()
        handles = []
        for number, prompt in enumerate(prompts_of(count, seed, length)):
            _sleep_until(begin + number * every)
            handles.append(self._pipe.submit(prompt, max_new_tokens=NEW.get(length, 64), ignore_eos=True))
        return summary(begin, every, [list(handle.output().token_times) for handle in handles])


class TimedBatching(Batching):
    """ContinuousBatchingPipeline, driven step by step, with the moments of all tokens of several clients."""

    def crowd(self, count: int, length: int, seed: int, every: float) -> dict[str, Any]:
        import openvino as ov
        import openvino_genai as genai

        config = genai.GenerationConfig(max_new_tokens=NEW.get(length, 64), ignore_eos=True)
        waiting = list(enumerate(prompts_of(count, seed, length)))
        handles: list[Any] = []
        times: list[list[float]] = [[] for _ in waiting]
        begin = time.perf_counter()
        while waiting or self._pipe.has_non_finished_requests():
            while waiting and time.perf_counter() >= begin + waiting[0][0] * every:
                number, prompt = waiting.pop(0)
                handles.append(self._pipe.add_request(number, ov.Tensor(prompt[None]), config))
            if not self._pipe.has_non_finished_requests():
                _sleep_until(begin + waiting[0][0] * every)
                continue
            self._pipe.step()
            now = time.perf_counter()
            for number, handle in enumerate(handles):
                while handle.can_read():
                    (output,) = handle.read().values()
                    times[number] += [now] * len(output.generated_ids)
        return summary(begin, every, times)


def summary(begin: float, every: float, times: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return what clients see whose requests came ``every`` so many seconds from ``begin`` on; ``times`` are those of tokens."""
    seconds = max(each[-1] for each in times) - begin
    firsts = [each[0] - begin - number * every for number, each in enumerate(times)]
    gaps = [after - before for each in times for before, after in pairwise(each)]
    return {
        "seconds": seconds,
        RATE: sum(map(len, times)) / seconds,
        "ttft_ms": 1e3 * statistics.median(firsts),
        "longest_gap_ms": 1e3 * max(gaps),
    }


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


class LengthsWorker(Worker):
    """A process with one peer."""

    script = __file__


def start(name: str, stack: ExitStack, model: str) -> Worker:
    """Load a peer, as it is by default."""
    kind, properties = PEERS[name]
    print(f"loading {name} …", file=sys.stderr)
    return stack.enter_context(LengthsWorker(kind, model, **properties))


def in_turns(workers: dict[str, Worker], rounds: int) -> Iterator[tuple[int, str, Worker]]:
    """Yield a warm-up and ``rounds`` rounds of all peers, each time with another one first."""
    items = list(workers.items())
    for seed in range(rounds + 1):
        first = seed % len(items)
        yield from ((seed, name, worker) for name, worker in (*items[first:], *items[:first]))


def one(figures: Figures, options: argparse.Namespace) -> None:
    for length in options.lengths or ONE:
        with ExitStack() as stack:
            workers = {name: start(name, stack, options.path) for name in options.peers}
            for worker in workers.values():
                worker.do("rest")
            for seed, name, worker in in_turns(workers, options.rounds):
                timed = worker.do("answer", length=length, seed=seed)
                if seed:
                    figures.add(f"ttft_{length}", name, timed["ttft_ms"])
                    figures.add(f"tpot_{length}", name, timed["tpot_ms"])


def clients(figures: Figures, options: argparse.Namespace) -> None:
    names = [name for name in options.peers if PEERS[name][0] != "genai"]  # that one serves one request after another
    for length in options.lengths or (64, 900, 4000):
        with ExitStack() as stack:
            workers = {name: start(name, stack, options.path) for name in names}
            for worker in workers.values():
                worker.do("rest")
            for every in (0.0, options.every):
                for count in options.clients if length < 4000 else [each for each in options.clients if each <= 8]:
                    for seed, name, worker in in_turns(workers, options.rounds) if not every or count > 1 else ():
                        own = 100 * count + seed  # no prompt of another row: who reuses prefixes would have less to do
                        found = worker.do("crowd", count=count, length=length, seed=own, every=every)
                        for measure, value in found.items() if seed else ():
                            row = f"{length} × {count}{f' every {every:g} s' if every else ''}, {measure}"
                            figures.add(f"clients {row}" if measure == RATE else row, name, value)
                print(f"{length} tokens, {'all at once' if not every else f'one every {every:g} s'}", file=sys.stderr)


def first_questions(figures: Figures, options: argparse.Namespace) -> None:
    for seed, name in ((seed, name) for seed in range(options.rounds) for name in options.peers):
        with ExitStack() as stack:
            worker = start(name, stack, options.gguf or options.path)
            figures.add("load_s", name, worker.load["seconds"])
            for number in range(QUESTIONS):
                timed = worker.do("answer", length=QUESTION, seed=100 * seed + number, count=ANSWER)
                figures.add(f"question {number + 1} ttft_ms", name, timed["ttft_ms"])
                figures.add(f"question {number + 1} tpot_ms", name, timed["tpot_ms"])


def chat(figures: Figures, options: argparse.Namespace) -> None:
    with ExitStack() as stack:
        workers = {name: start(name, stack, options.path) for name in options.peers}
        for worker in workers.values():
            worker.do("rest")
        for seed, name, worker in in_turns(workers, max(1, options.rounds // 2)):
            for turn in worker.do("conversation", seed=seed)["turns"] if seed else ():
                figures.add(f"turn at {turn['length']} ttft_ms", name, turn["ttft_ms"])
                figures.add(f"turn at {turn['length']} tpot_ms", name, turn["tpot_ms"])


def conversation(peer: Peer, seed: int) -> dict[str, Any]:
    """Ask in a conversation that grows by ``TURN`` and the answer each time; return the figures of each turn."""
    tokens: list[int] = []
    turns: list[dict[str, Any]] = []
    questions = prompts_of(CONVERSATION // TURN, seed, TURN)
    while len(tokens) + TURN + REPLY <= CONVERSATION:
        tokens += [int(token) for token in questions[len(turns)]]
        timed, answer = timed_answer(peer, tokens)
        turns.append({"length": len(tokens), **timed})
        tokens += answer
    return {"turns": turns[:: max(1, len(turns) // 5)]}


def timed_answer(peer: Peer, tokens: Sequence[int]) -> tuple[dict[str, Any], list[int]]:
    import numpy as np
    from bench_workers import make_clock

    clock = make_clock()
    begin = time.perf_counter()
    answer = peer.run(np.array(tokens), REPLY, clock)
    first, *_, last = clock.times
    return {"ttft_ms": 1e3 * (first - begin), "tpot_ms": 1e3 * (last - first) / (len(clock.times) - 1)}, list(answer)


def report(figures: Figures) -> str:
    """Return a table: the medians of each row, and the ratio of ours to the best setting of GenAI."""
    names = list(PEERS)
    lines = [f"| row | {' | '.join(names)} | ours / {BEST} |", "|---|" + "---|" * (len(names) + 1)]
    for measure in figures.values:
        medians = [figures.median(measure, name) for name in names]
        ratio = figures.ratio(Figure(measure), Figure(measure, BEST))
        shown = ["" if value is None else f"{value:.4g}" for value in medians]
        lines.append(f"| {measure} | {' | '.join(shown)} | {'' if ratio is None else f'{ratio:.2f}'} |")
    return "\n".join(lines)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="[all]")
    parser.add_argument("--lengths", nargs="+", type=int, help="tokens of prompts  [those of each row]")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 4, 8, 16], help="[1 4 8 16]")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two arrivals  [2]")
    parser.add_argument("--rounds", type=int, default=3, help="[3]")
    parser.add_argument("--model", choices=sorted(SHAPES), default="qwen2-0.5b", help="[qwen2-0.5b]")
    parser.add_argument("--gguf", help="a GGUF file for the rows of start, which both sides read")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS), help="[all]")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench", help="where the JSON goes")
    options = parser.parse_args()
    options.path = str(make(options.model))
    return options


def main() -> None:
    options = read_options()
    figures = Figures()
    rows = {"one": one, "clients": clients, "start": first_questions, "chat": chat}
    for name in options.rows:
        rows[name](figures, options)
        options.output.mkdir(parents=True, exist_ok=True)
        result = {"machine": this_machine(None).as_dict(), "command": sys.argv, "figures": figures.values}
        (options.output / "bench_lengths.json").write_text(json.dumps(result, indent=1))
    print(report(figures))


def work() -> None:
    """Be a worker: load one pipeline, then answer jobs."""
    what = json.loads(sys.argv[1])
    begin = time.perf_counter()
    kinds: dict[str, Callable[..., Peer]] = {"ours": TimedOurs, "batching": TimedBatching, "genai": Genai}
    peer = kinds[what["kind"]](what["path"], what["properties"])
    print(json.dumps({"seconds": time.perf_counter() - begin, "later_seconds": 0.0}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        name = job.pop("job")
        result = conversation(peer, **job) if name == "conversation" else getattr(peer, name)(**job)
        if name != "rest":
            peer.settle()
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    work() if len(sys.argv) == 2 and sys.argv[1].startswith("{") else main()
