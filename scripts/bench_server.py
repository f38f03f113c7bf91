"""Measures what the server costs: TTFT, throughput and processor time over HTTP against the same pipeline in process, in turns.

Answers do not end before their length, so that each has the same tokens. The processor time of the server is that of its process,
and that of its clients is this process's; the pipeline and its callers are one process.

python scripts/bench_server.py --clients 1 8 --rounds 5
python scripts/bench_server.py --threads 1     # leaves a core to the server's loop and to the clients, on both sides
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

import psutil
from _setup import ROOT

from staticllm import StaticLLMPipeline, demo_model_path

WORDS = (
    "fox",
    "river",
    "rain",
    "house",
    "light",
    "stone",
    "bread",
    "music",
    "winter",
    "garden",
    "road",
    "paper",
    "engine",
)
SETTINGS = {"MIN_RESPONSE_LEN": 512}
_numbers = count()


@dataclass(frozen=True)
class Answer:
    """Seconds to the first text, and the number of tokens."""

    ttft: float
    num_tokens: int


Ask = Callable[[list[dict[str, str]], int], Answer]


def prompt() -> list[dict[str, str]]:
    """Return a conversation that shares no long prefix with another one."""
    number = next(_numbers)
    words = [WORDS[(number * 7 + place * place) % len(WORDS)] for place in range(24)]
    return [{"role": "user", "content": f"{number} {' '.join(words)}"}]


def ask_pipeline(pipe: StaticLLMPipeline) -> Ask:
    def ask(messages: list[dict[str, str]], num_tokens: int) -> Answer:
        start, ttft = time.perf_counter(), 0.0
        handle = pipe.submit(messages, max_new_tokens=num_tokens, min_new_tokens=num_tokens, parse_tools=True)
        for _ in handle:
            ttft = ttft or time.perf_counter() - start
        return Answer(ttft, len(handle.output().tokens))

    return ask


def ask_server(port: int) -> Ask:
    def ask(messages: list[dict[str, str]], num_tokens: int) -> Answer:
        body = json.dumps(
            {"messages": messages, "max_tokens": num_tokens, "min_tokens": num_tokens, "stream": True,
             "stream_options": {"include_usage": True}}
        )  # fmt: skip
        start, ttft, last = time.perf_counter(), 0.0, b""
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        for line in response:
            if not ttft and b'"content":"' in line and b'"role"' not in line:
                ttft = time.perf_counter() - start
            if line.startswith(b"data: {"):
                last = line
        connection.close()
        return Answer(ttft, json.loads(last[6:])["usage"]["completion_tokens"])

    return ask


@dataclass(frozen=True)
class Side:
    """One of the two that are compared: how it is asked, and the process in which its answers are made."""

    ask: Ask
    process: psutil.Process


@dataclass(frozen=True)
class Round:
    """The median TTFT in ms, tokens per second of all clients together, and the processor's microseconds per token.

    ``client_us``: those of the clients, if they are another process; else 0.
    """

    ttft_ms: float
    tokens_per_second: float
    cpu_us: float
    client_us: float


def run(side: Side, clients: int, requests: int, num_tokens: int) -> Round:
    """Let each client send its requests one after another."""
    ask, process = side.ask, side.process

    def one(_: int) -> list[Answer]:
        return [ask(prompt(), num_tokens) for _ in range(requests)]

    clients_of = psutil.Process()
    start, used, used_here = time.perf_counter(), _cpu_seconds(process), _cpu_seconds(clients_of)
    with ThreadPoolExecutor(clients) as pool:
        answers = [answer for found in pool.map(one, range(clients)) for answer in found]
    seconds = time.perf_counter() - start
    num_answered = sum(answer.num_tokens for answer in answers)
    return Round(
        statistics.median(answer.ttft for answer in answers) * 1e3,
        num_answered / seconds,
        (_cpu_seconds(process) - used) * 1e6 / num_answered,
        (_cpu_seconds(clients_of) - used_here) * 1e6 / num_answered if clients_of != process else 0.0,
    )


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=6, help="requests of each client in a round")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, help="INFERENCE_NUM_THREADS of both sides")
    parser.add_argument("--model", default=str(demo_model_path()))
    options = parser.parse_args()
    settings = SETTINGS | ({"INFERENCE_NUM_THREADS": options.threads} if options.threads else {})
    command = [sys.executable, "-m", "staticllm", "serve", options.model, "--port", "0", "--max-per-client", "64"]
    command += [word for name, value in settings.items() for word in ("-p", f"{name}={value}")]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline().split("/v1")[0].rsplit(":", 1)[1])
        with StaticLLMPipeline(options.model, "CPU", **settings) as pipe:
            sides = {
                "pipeline": Side(ask_pipeline(pipe), psutil.Process()),
                "server": Side(ask_server(port), psutil.Process(server.pid)),
            }
            for side in sides.values():
                run(side, 8, 2, 32)  # warm up
            print(f"{psutil.cpu_count()} cores, load before {psutil.getloadavg()[0]:.1f}")
            for clients in options.clients:
                compare(sides, clients, options)
    finally:
        server.terminate()
        server.wait(30)


def compare(sides: dict[str, Side], clients: int, options: argparse.Namespace) -> None:
    """Run both in turns, and print the medians of the rounds."""
    rounds: dict[str, list[Round]] = {name: [] for name in sides}
    for number in range(options.rounds):
        for name in sorted(sides, reverse=bool(number % 2)):
            rounds[name].append(run(sides[name], clients, options.requests, options.tokens))
    ttft = {name: statistics.median(each.ttft_ms for each in found) for name, found in rounds.items()}
    speed = {name: statistics.median(each.tokens_per_second for each in found) for name, found in rounds.items()}
    cpu = {name: statistics.median(each.cpu_us for each in found) for name, found in rounds.items()}
    clients_us = {name: statistics.median(each.client_us for each in found) for name, found in rounds.items()}
    for name in sides:
        figures = f"TTFT {ttft[name]:7.2f} ms  {speed[name]:7.1f} tokens/s  CPU {cpu[name]:6.0f} us per token"
        figures += f", clients {clients_us[name]:.0f}" if clients_us[name] else ""
        print(f"{clients} clients  {name:<9} {figures}")
    extra, share = ttft["server"] - ttft["pipeline"], speed["server"] / speed["pipeline"]
    print(f"{clients} clients  server: TTFT {extra:+.2f} ms, throughput {share:.3f}")


if __name__ == "__main__":
    main()
