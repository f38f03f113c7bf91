"""Measures what a shared beginning saves: a decoder that reranks texts by one query, with and without it, in turns.

python scripts/bench_rerank.py                                # the Qwen2-0.5B-shaped model of make_bench_model.py
python scripts/bench_rerank.py MODEL --texts 64 --query 80 --own 100 --words no yes

The query with its instruction has about --query tokens, and each text about --own tokens. A ratio is the median over --rounds of
the ratios within a round. The scores of both are compared.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from staticllm import StaticRerankPipeline
from staticllm.pipelines.embedding.packing import prefix_groups

MODEL = Path.home() / ".cache" / "staticllm" / "bench" / "qwen2-0.5b"
WORDS = [
    "river",
    "stone",
    "paper",
    "light",
    "music",
    "garden",
    "number",
    "winter",
    "engine",
    "letter",
    "window",
    "island",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", default=MODEL)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--query", type=int, default=80, help="tokens")
    parser.add_argument("--own", type=int, default=100, help="tokens of each text")
    parser.add_argument("--words", nargs=2, default=[" no", " and"], help="the tokens whose logits are compared")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with StaticRerankPipeline(options.model, score_words=tuple(options.words), max_length=512) as pipe:
        query, *texts = [_text(pipe, seed, options.own if seed else options.query) for seed in range(options.texts + 1)]
        print(json.dumps(_measured(pipe, query, texts, options.rounds)))


def _text(pipe: StaticRerankPipeline, seed: int, num_tokens: int) -> str:
    """Return words that have about so many tokens."""
    chosen = random.Random(seed)
    found = ""
    while pipe.count_tokens([found or " "])[0] < num_tokens:
        found += chosen.choice(WORDS) + " "
    return found


def _measured(pipe: StaticRerankPipeline, query: str, texts: list[str], rounds: int) -> dict[str, object]:
    shared, plain = list[float](), list[float]()
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        scores = pipe.scores(query, texts)
        shared.append(time.perf_counter() - begin)
        with _nothing_shared():
            begin = time.perf_counter()
            expected = pipe.scores(query, texts)
            plain.append(time.perf_counter() - begin)
    ratios = [one / other for one, other in zip(plain[1:], shared[1:], strict=True)]
    return {
        "texts": len(texts),
        "shared, s": round(statistics.median(shared[1:]), 3),
        "each whole, s": round(statistics.median(plain[1:]), 3),
        "speed-up": round(statistics.median(ratios), 2),
        "largest difference of scores": float(np.abs(scores - expected).max()),
    }


@contextmanager
def _nothing_shared() -> Iterator[None]:
    least, prefix_groups.LEAST_SHARED = prefix_groups.LEAST_SHARED, 1 << 30
    try:
        yield
    finally:
        prefix_groups.LEAST_SHARED = least


if __name__ == "__main__":
    main()
