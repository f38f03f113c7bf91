"""Runs many clients that cancel, disconnect, miss deadlines and send bad input, and checks that nothing leaks or hangs.

    python scripts/soak.py                      # 64 clients for 2 minutes on the embedded model
    python scripts/soak.py --clients 16 --seconds 10

At the end the arena must be empty, all threads must have ended, and every answer must be a beginning of the right one. Memory
is printed meanwhile and must not grow after the first third.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections import Counter

import numpy as np
import psutil

from staticllm import BusyError, PromptTooLongError, StaticLLMPipeline, demo_model_path

PROMPTS, LONGEST, NEW = 24, 200, 48
MOST_GROWTH = 24 * 2**20  # bytes, between the first third and the end


class Clients:
    """Threads that submit requests, read answers, and behave badly."""

    def __init__(self, pipe: StaticLLMPipeline, seed: int) -> None:
        rng = np.random.default_rng(seed)
        shared = rng.integers(8, 1000, 40).tolist()
        lengths = [int(rng.integers(1, LONGEST - 40)) for _ in range(PROMPTS)]
        self.prompts = [(shared if i % 3 else []) + rng.integers(8, 1000, n).tolist() for i, n in enumerate(lengths)]
        self.pipe, self.outcomes, self.failures = pipe, Counter[str](), list[str]()
        self.expected = [self._alone(prompt) for prompt in self.prompts]

    def _alone(self, prompt: list[int]) -> list[int]:
        return self.pipe.generate(np.array(prompt), max_new_tokens=NEW, ignore_eos=True).tokens[0]

    def run(self, seed: int, until: float) -> None:
        dice = random.Random(seed)
        while time.monotonic() < until:
            try:
                self.outcomes[self._one(dice)] += 1
            except Exception as error:
                self.failures.append(repr(error))

    def _one(self, dice: random.Random) -> str:
        which, manner = dice.randrange(PROMPTS), dice.choice(["read", "read", "cancel", "drop", "deadline", "bad"])
        deadline = dice.uniform(1, 400) if manner == "deadline" else None
        if manner == "bad":
            try:
                self.pipe.submit(np.arange(8, 8 + LONGEST + 1))
            except PromptTooLongError:
                return "refused"
            raise AssertionError("a prompt that is too long was taken")
        try:
            handle = self.pipe.submit(
                np.array(self.prompts[which]), max_new_tokens=NEW, ignore_eos=True, deadline_ms=deadline,
                priority=dice.randrange(3),
            )  # fmt: skip
        except BusyError:
            time.sleep(0.01)
            return "busy"
        if manner == "drop":
            next(handle.tokens(), None)
            return "dropped"
        if manner == "cancel":
            time.sleep(dice.uniform(0, 0.2))
            handle.cancel()
        result = handle.result(timeout=60)
        tokens = result.tokens[0]
        if tokens != self.expected[which][: len(tokens)]:
            raise AssertionError(f"prompt {which}: {tokens} is not {self.expected[which]}")
        return str(result.finish_reasons[0])


def held(pipe: StaticLLMPipeline) -> tuple[int, int, int]:
    """Return the slots in use without idle conversations, the swapped slots, and the number of requests."""
    engine = pipe.engine
    return engine.run_between_steps(
        lambda: (
            engine.runner.cache.slots.num_used - engine.core.device.kv_manager.prefix.idle_slots,
            engine.core.device.kv_manager.host_pool.num_swapped_slots,
            len(engine.core.device.kv_manager.states),
        )
    )


def soak(num_clients: int, seconds: float, seed: int = 0) -> list[str]:
    """Run the clients and return a list of everything that went wrong."""
    pipe = StaticLLMPipeline(
        demo_model_path(), "CPU", MAX_PROMPT_LEN=LONGEST, MIN_RESPONSE_LEN=64, MAX_NUM_SEQS=8, KV_SLOTS=1200,
        HOST_KV_SLOTS=2000, INFERENCE_PRECISION_HINT="f32",
    )  # fmt: skip
    clients, process, until = Clients(pipe, seed), psutil.Process(), time.monotonic() + seconds
    threads = [threading.Thread(target=clients.run, args=(seed + i, until)) for i in range(num_clients)]
    for thread in threads:
        thread.start()
    memory = []
    while time.monotonic() < until:
        time.sleep(seconds / 30)
        memory.append(process.memory_info().rss)
    for thread in threads:
        thread.join(timeout=120)
    wrong = list(clients.failures)
    if any(thread.is_alive() for thread in threads):
        wrong.append("a client hangs")
    time.sleep(0.2)
    if (left := held(pipe)) != (0, 0, 0):
        wrong.append(f"rows, swapped out rows and requests that are left: {left}")
    growth = max(memory[-3:]) - max(memory[: len(memory) // 3])
    if growth > MOST_GROWTH:
        wrong.append(f"memory grew by {growth / 2**20:.0f} MiB")
    stats = pipe.stats()
    pipe.close()
    if any(thread.name.startswith("staticllm") for thread in threading.enumerate()):
        wrong.append("a thread is left")
    print(f"{num_clients} clients, {seconds:g} s: {stats.num_requests} requests, {stats.num_tokens} tokens")
    print(dict(clients.outcomes))
    first, third, last = (memory[place] / 2**20 for place in (0, len(memory) // 3, -1))
    print(f"memory {first:.0f} MiB, after a third {third:.0f}, at the end {last:.0f}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120)
    options = parser.parse_args()
    wrong = soak(options.clients, options.seconds)
    print(*wrong[:10], sep="\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
