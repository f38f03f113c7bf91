"""A chat that decodes beside documents in bulk, on one shared engine or on two pipelines in one process."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from bench_embedding_texts import texts as make_texts
from bench_workers import make_clock, prompts_of

ROOT = Path(__file__).resolve().parent.parent
NUM_NEW, BULK_TEXTS, PROMPTS = 120, 64, 4


class Chat:
    """A language model, the demo model unless ``chat`` is the folder of another one, and an encoder in one process."""

    def __init__(self, path: str, is_shared: bool, threads: int, chat: str | None) -> None:
        from staticllm import StaticEmbeddingPipeline, StaticLLMPipeline, demo_model_path

        self._llm = StaticLLMPipeline(chat or demo_model_path(), "CPU", INFERENCE_NUM_THREADS=threads)
        shared: dict[str, Any] = {"engine": self._llm.engine} if is_shared else {}
        self._encoder = StaticEmbeddingPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads, **shared)
        self._llm.wait_until_complete()

    def close(self) -> None:
        self._encoder.close()
        self._llm.close()

    def stream(self, seed: int) -> dict[str, Any]:
        """Run chats alone: times to the first token, and the longest gap between two tokens."""
        ttfts, gaps = [], list[float]()
        for prompt in prompts_of(PROMPTS, seed):
            clock = make_clock()
            begin = time.perf_counter()
            self._llm.generate(prompt, streamer=clock, max_new_tokens=NUM_NEW, ignore_eos=True)
            ttfts.append(clock.times[0] - begin)
            gaps += [after - before for before, after in pairwise(clock.times)]
        return {"ttft_ms": 1e3 * float(np.median(ttfts)), "gap_ms": 1e3 * max(gaps)}

    def bulk(self, seed: int) -> dict[str, Any]:
        """Embed documents alone."""
        texts = make_texts(BULK_TEXTS, seed)
        begin = time.perf_counter()
        self._encoder.encode(texts)
        return {"texts_per_second": BULK_TEXTS / (time.perf_counter() - begin)}

    def both(self, seed: int) -> dict[str, Any]:
        """Run chats while documents are embedded one list after another; count those that were done until the last token."""
        texts, ends, done = make_texts(BULK_TEXTS, seed), threading.Event(), [0]
        errors: list[BaseException] = []

        def embed() -> None:
            def count(num_done: int, _: int) -> None:
                if not ends.is_set():
                    done[0] = base + num_done

            try:
                while not ends.is_set():
                    base = done[0]
                    self._encoder.encode(texts, on_progress=count)
            except BaseException as error:  # raised by the caller, after the thread has ended
                errors.append(error)

        thread = threading.Thread(target=embed)
        thread.start()
        begin = time.perf_counter()
        try:
            found = self.stream(seed)
        finally:
            seconds = time.perf_counter() - begin
            ends.set()
            thread.join()
        if errors:
            raise errors[0]
        return {**found, "texts_per_second": done[0] / seconds}
