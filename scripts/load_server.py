"""Loads a server with streaming clients of all kinds, and checks every answer and what is left at the end.

python scripts/load_server.py --clients 64 --seconds 60

Most clients stream and compare the text with the same answer alone. Others leave in the middle, read one byte a second, close
their sending side, or send what is no request. Exit code 1 if an answer was wrong, or if something is left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import h11
import psutil
from _setup import ROOT
from load_connection import Connection

EXACT = (
    "INFERENCE_PRECISION_HINT=f32",
    "KV_CACHE_PRECISION=f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE=0",
    "PROGRAMS=shared",
)
PROMPTS = (
    "What is an NPU?",
    "Hello, who are you?",
    "Tell me about the sea.",
    "Why is the sky blue?",
    "How does a fridge work?",
)
MAX_TOKENS = 48
MAX_BODY_MB = 1
ANSWER_SECONDS = 180.0
SLOW_SECONDS = 6
WARM_SECONDS = 20.0
"""At most so many seconds of the same load come before what the server holds is noted. Buffers grow with the first requests: by
some 100 MiB in 8 s of 12 clients, and then no more in 80 s."""
IDLE_SECONDS = 60.0
FDS_MORE = 4
"""Descriptors that may be open at the end beyond those of the server before any load."""
MIB_MORE = 96
"""MiB of private memory that may be used at the end beyond those before."""


class WrongError(Exception):
    """An answer that is neither right nor a proper error."""


@dataclass
class Found:
    """What the clients saw: counts of ends by kind of client, wrong answers, gaps and times to the first token in seconds."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)


def body_of(prompt: str, **more: object) -> bytes:
    """Return the body of a request that streams."""
    messages = [{"role": "user", "content": prompt}]
    usage = {"include_usage": True}
    body = {"messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS, "stream": True, "stream_options": usage}
    return json.dumps({**body, **more}).encode()


def check_refusal(status: int, headers: dict[str, str], data: bytes, allowed: tuple[int, ...]) -> str:
    """Return the end's name for a proper error.

    Raises:
        WrongError: it is none.
    """
    try:
        error = json.loads(data)["error"]
        is_proper = status in allowed and isinstance(error["message"], str) and "\n" not in error["message"]
    except (ValueError, KeyError, TypeError):
        is_proper = False
    if not is_proper or (status in (429, 503) and "retry-after" not in headers):
        raise WrongError(f"status {status}: {data[:200]!r}")
    return f"refused with {status}"


class Clients:
    """The kinds of clients; each method sends one request and returns how it ended."""

    def __init__(self, port: int, expected: dict[str, str], found: Found, seed: int) -> None:
        self._port, self._expected, self._found = port, expected, found
        self._random = random.Random(seed)
        self._kinds: list[tuple[int, Callable[[], Awaitable[str]]]] = [
            (60, self.stream), (12, self.leave), (6, self.read_slowly), (6, self.close_sending_side), (4, self.send_too_much),
            (4, self.send_a_wrong_type), (4, self.send_no_json), (4, self.stop_in_the_body),
        ]  # fmt: skip

    async def run(self, end: float) -> None:
        """Send requests until the moment ``end``, and one of each kind however long that takes."""
        kinds = [kind for _, kind in self._kinds]
        first = self._random.sample(kinds, len(kinds))
        while first or time.monotonic() < end:
            kind = first.pop() if first else self._random.choices(kinds, [weight for weight, _ in self._kinds])[0]
            try:
                how = await asyncio.wait_for(kind(), ANSWER_SECONDS)
                self._found.ends[f"{kind.__name__}: {how}"] += 1
            except Exception as error:
                self._found.wrong.append(f"{kind.__name__}: {type(error).__name__}: {error}")

    async def stream(self, prompt: str | None = None) -> str:
        """Read a whole answer, and compare it."""
        prompt = prompt or self._random.choice(PROMPTS)
        async with Connection.open(self._port) as connection:
            begin = time.perf_counter()
            await connection.post(body_of(prompt))
            text, reason, usage, last = "", None, None, 0.0
            async for event in self._chunks(connection):
                if isinstance(event, str):
                    return event
                now = time.perf_counter()
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    reason = choice["finish_reason"] or reason
                    piece = choice["delta"].get("content")
                    if piece:
                        (self._found.gaps if last else self._found.ttfts).append(now - (last or begin))
                        text, last = text + piece, now
        expected = self._expected.setdefault(prompt, text)
        if text != expected or reason not in ("stop", "length") or not usage:
            raise WrongError(f"{prompt!r}: {text!r} ({reason}) instead of {expected!r}")
        return "right"

    async def _chunks(self, connection: Connection) -> AsyncIterator[dict[str, Any] | str]:
        """Yield the events of a stream, or the name of a refusal.

        Raises:
            WrongError: something else came, or the stream ended in its middle.
        """
        status, headers, rest, is_done = 0, {}, b"", False
        async for event in connection.events():
            if isinstance(event, h11.Response):
                status, headers = event.status_code, {name.decode(): value.decode() for name, value in event.headers}
            elif isinstance(event, h11.Data):
                *lines, rest = (rest + bytes(event.data)).split(b"\n")
                for line in lines if status == 200 else ():
                    if line.startswith(b"data: {"):
                        yield json.loads(line[6:])
                    is_done = is_done or line.strip() == b"data: [DONE]"
                if status != 200:
                    rest = b"\n".join([*lines, rest])
        if status != 200:
            yield check_refusal(status, headers, rest, (429, 503))
        elif not is_done:
            raise WrongError("a stream without [DONE]")

    async def leave(self) -> str:
        """Close the connection after some bytes."""
        async with Connection.open(self._port) as connection:
            await connection.post(body_of(self._random.choice(PROMPTS)))
            await connection.reader.read(self._random.randrange(1, 4000))
            if self._random.random() < 0.5:
                connection.writer.transport.abort()  # a reset in place of an end
        return "left"

    async def read_slowly(self) -> str:
        """Read one byte a second, and leave."""
        async with Connection.open(self._port, limit=2) as connection:
            await connection.post(body_of(self._random.choice(PROMPTS), max_tokens=400, ignore_eos=True))
            for _ in range(SLOW_SECONDS):
                await connection.reader.read(1)
                await asyncio.sleep(1)
        return "left"

    async def close_sending_side(self) -> str:
        """Close the sending side after a request: for the server this client has gone."""
        async with Connection.open(self._port) as connection:
            await connection.post(body_of(self._random.choice(PROMPTS)))
            connection.writer.write_eof()
            while await connection.reader.read(65536):
                pass
        return "closed by the server"

    async def send_too_much(self) -> str:
        """Announce a body beyond the limit, and send some of it."""
        async with Connection.open(self._port) as connection:
            await connection.post(b"[" * 70000, length=(MAX_BODY_MB << 20) + 1)
            return check_refusal(*await connection.whole(), allowed=(413,))

    async def send_a_wrong_type(self) -> str:
        """Send a form; JSON is read whatever its type is said to be, as curl says a wrong one by default."""
        async with Connection.open(self._port) as connection:
            await connection.post(b"messages=Hello&stream=true", kind="application/x-www-form-urlencoded")
            return check_refusal(*await connection.whole(), allowed=(400, 415))

    async def send_no_json(self) -> str:
        """Send half of a body as if it were whole."""
        async with Connection.open(self._port) as connection:
            await connection.post(body_of("Hello")[:-5])
            return check_refusal(*await connection.whole(), allowed=(400,))

    async def stop_in_the_body(self) -> str:
        """Leave before the body has ended."""
        async with Connection.open(self._port) as connection:
            await connection.post(body_of("Hello")[:20], length=100)
        return "left"


@dataclass(frozen=True)
class Held:
    """What the server process holds: descriptors, threads, connections, MiB of private memory."""

    fds: int
    threads: int
    connections: int
    mib: int

    @classmethod
    def of(cls, process: psutil.Process) -> Held:
        """Return what a process holds now."""
        with process.oneshot():
            return cls(
                process.num_fds(), process.num_threads(), len(process.net_connections("tcp")),
                process.memory_full_info().uss >> 20,
            )  # fmt: skip


def get(port: int, path: str) -> str:
    """Return what a path of the server answers."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as response:
        return str(response.read().decode())


def busy(port: int) -> dict[str, float]:
    """Return the gauges of requests that are in the server or its engine; those that are 0 are left out."""
    found: dict[str, float] = {}
    for line in get(port, "/metrics").splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith(("staticllm_running_requests{", "staticllm_waiting_requests{")) and float(value):
            found[name] = float(value)
    requests = json.loads(get(port, "/api/scheduler"))["requests"]
    return found | ({"requests of the engine": float(len(requests))} if requests else {})


async def load(port: int, num_clients: int, seconds: float, seed: int, process: psutil.Process) -> tuple[Found, Held]:
    """Run the clients; return what they saw, and what the server held before them."""
    found, expected = Found(), dict[str, str]()
    alone = Clients(port, expected, Found(), seed)
    idle = Held.of(process)
    for prompt in PROMPTS:
        assert await alone.stream(prompt) == "right"
    clients = [Clients(port, expected, Found(), seed - number - 1) for number in range(num_clients)]
    warm = time.monotonic() + min(WARM_SECONDS, seconds)
    await asyncio.gather(*(client.run(warm) for client in clients))
    before = replace(Held.of(process), fds=idle.fds)  # connections are closed while it is noted
    end = time.monotonic() + seconds
    clients = [Clients(port, expected, found, seed + number + 1) for number in range(num_clients)]
    await asyncio.gather(*(client.run(end) for client in clients))
    return found, before


async def after(port: int, process: psutil.Process) -> tuple[Held, dict[str, float], int]:
    """Return what the server holds and runs once it has nothing to do, and the KV slots in use with one small request."""
    end, left = time.monotonic() + IDLE_SECONDS, busy(port)
    while left and time.monotonic() < end:
        await asyncio.sleep(0.2)
        left = busy(port)
    await asyncio.sleep(1.0)
    await Clients(port, {}, Found(), 0).stream(PROMPTS[0])
    slots = json.loads(get(port, "/api/scheduler"))["totals"]["slots_in_use"]
    return Held.of(process), left, slots


def percentile(values: list[float], share: float) -> float:
    """Return a percentile in ms."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3, 1) if ordered else 0.0


def report(found: Found, before: Held, held: Held, left: dict[str, float], slots: int) -> dict[str, Any]:
    """Return the result as JSON types; ``problems`` is empty if all is well."""
    problems = [f"{len(found.wrong)} wrong answers, such as {found.wrong[0]}"] if found.wrong else []
    if not found.ends["stream: right"]:
        problems.append("no answer was right")
    problems += [f"{name} is {value:g} at the end" for name, value in left.items()]
    if slots > MAX_TOKENS * 4:
        problems.append(f"{slots} KV slots are in use by one small request")
    if held.fds > before.fds + FDS_MORE:
        problems.append(f"{held.fds} file descriptors at the end, {before.fds} before")
    if held.mib > before.mib + MIB_MORE:
        problems.append(f"{held.mib} MiB at the end, {before.mib} before")
    return {
        "ends": dict(sorted(found.ends.items())),
        "gap_ms": {
            "p50": percentile(found.gaps, 0.5),
            "p99": percentile(found.gaps, 0.99),
            "max": percentile(found.gaps, 1.0),
        },
        "ttft_ms": {"p50": percentile(found.ttfts, 0.5), "p99": percentile(found.ttfts, 0.99)},
        "mean_gap_ms": round(statistics.fmean(found.gaps) * 1e3, 1) if found.gaps else 0.0,
        "before": vars(before),
        "after": vars(held),
        "slots": slots,
        "problems": problems,
    }


@contextlib.contextmanager
def server(extra: list[str]):  # type: ignore[no-untyped-def]
    """Start a server with the embedded model, and yield its process and port."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        command = [sys.executable, "-m", "staticllm", "serve", "--port", "0", "--ready-file", str(ready)]
        command += ["--max-body-mb", str(MAX_BODY_MB), "-p", "PREFIX_CACHING=False", *extra]
        for value in EXACT:
            command += ["-p", value]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT)
        try:
            while not ready.exists():
                if process.poll() is not None:
                    sys.exit("the server has ended")
                time.sleep(0.05)
            yield psutil.Process(process.pid), json.loads(ready.read_text())["port"]
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
        if code:
            sys.exit(f"the server ended with exit code {code}")


def main() -> None:
    """Load a server, print the result as JSON, and end with exit code 1 if there is a problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("extra", nargs="*", help="options of staticllm serve, after --")
    given = parser.parse_args()
    with server(given.extra) as (process, port):
        found, before = asyncio.run(load(port, given.clients, given.seconds, given.seed, process))
        held, left, slots = asyncio.run(after(port, process))
    result = report(found, before, held, left, slots)
    print(json.dumps(result, indent=2))
    sys.exit(1 if result["problems"] else 0)


if __name__ == "__main__":
    main()
