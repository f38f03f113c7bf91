"""Measures embeddings: texts per second of ours and of other engines, in turns, for several numbers of clients.

python scripts/bench_embedding.py path/to/all-MiniLM-L6-v2-ov --sentence-transformers path/to/all-MiniLM-L6-v2
python scripts/bench_embedding.py MODEL --engines ours genai --clients 1 16 --rounds 3 --json result.json
python scripts/bench_embedding.py MODEL --beside path/to/llm      # a chat that decodes while documents are embedded

The texts are the paragraphs of docs/. With C clients each has one text in flight: C requests for ours, and a list of C texts for
an engine that takes lists. Every engine runs in a process of its own, and its vectors are compared with the first engine's. An
engine that is not installed is left out.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
CLIENTS = (1, 4, 16, 64, 256)
SECONDS = 2.5
"""The least time of one measurement; short ones repeat."""
TOKEN_BUDGET = 512
"""The tokens of one padded batch of the engine that sorts."""
F32 = {"INFERENCE_PRECISION_HINT": "f32"}
Embed = Callable[[list[str]], np.ndarray]


def texts_of_docs() -> list[str]:
    """Return the paragraphs of the documentation, without tables, code and headings, in an order that mixes their lengths."""
    found = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = re.sub(r"```.*?```|<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for part in text.split("\n\n"):
            line = " ".join(part.split())
            if len(line) > 30 and not line.startswith(("#", "|", "<")):
                found.append(line[:1500])
    return [found[index] for index in np.random.default_rng(0).permutation(len(found))]


class Ours:
    """``StaticEmbeddingPipeline``; every text of a list is a request of its own, as clients of a server send them."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        from staticllm import StaticEmbeddingPipeline

        self.pipe = StaticEmbeddingPipeline(path, "CPU", **options)

    def __call__(self, texts: list[str]) -> np.ndarray:
        if len(texts) == 1:
            return self.pipe.encode(texts)
        return np.array([handle.result() for handle in [self.pipe.submit(text) for text in texts]])

    def encode(self, texts: list[str]) -> np.ndarray:
        return self.pipe.encode(texts)


def genai(path: str, options: dict[str, Any], is_sorted: bool = False) -> Embed:
    """GenAI's pipeline with the pooling of the model, which it does not read; lists as they are, or sorted in batches of 16."""
    import openvino_genai

    config = openvino_genai.TextEmbeddingPipeline.Config(
        pooling_type=openvino_genai.TextEmbeddingPipeline.PoolingType.MEAN, normalize=True
    )
    pipe = openvino_genai.TextEmbeddingPipeline(path, "CPU", config, **options)

    def embed(texts: list[str]) -> np.ndarray:
        if not is_sorted:
            return np.array(pipe.embed_documents(texts), np.float32)
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        vectors: dict[int, Any] = {}
        for start in range(0, len(order), 16):
            part = order[start : start + 16]
            vectors.update(zip(part, pipe.embed_documents([texts[index] for index in part]), strict=True))
        return np.array([vectors[index] for index in range(len(texts))], np.float32)

    return embed


def sentence_transformers(path: str, backend: str) -> Embed:
    from sentence_transformers import SentenceTransformer

    options = (
        {"backend": "openvino", "model_kwargs": {"file_name": "openvino_model.xml"}} if backend == "openvino" else {}
    )
    model = SentenceTransformer(path, device="cpu", **options)
    return lambda texts: model.encode(texts, normalize_embeddings=True, show_progress_bar=False)


def dynamic(path: str, options: dict[str, Any]) -> Embed:
    """Plain OpenVINO: sorted texts in padded batches of at most ``TOKEN_BUDGET`` tokens, pooled by the mean."""
    import openvino
    import openvino_genai

    program = openvino.Core().compile_model(Path(path) / "openvino_model.xml", "CPU", options)
    tokenizer = openvino_genai.Tokenizer(path)

    def run(ids: list[np.ndarray]) -> np.ndarray:
        longest = max(map(len, ids))
        mask = np.array([[1] * len(one) + [0] * (longest - len(one)) for one in ids])
        padded = np.array([np.pad(one, (0, longest - len(one))) for one in ids])
        feeds = {"input_ids": padded, "attention_mask": mask, "token_type_ids": np.zeros_like(mask)}
        states = program({name: feeds[name] for port in program.inputs for name in port.get_names() & set(feeds)})[0]
        vectors = (states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.float32)

    def embed(texts: list[str]) -> np.ndarray:
        found = tokenizer.encode(texts)
        ids = [
            row[mask.astype(bool)][:256]
            for row, mask in zip(found.input_ids.data, found.attention_mask.data, strict=True)
        ]
        order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
        vectors, start = {}, 0
        while start < len(order):
            end = start + 1
            while end < len(order) and (end + 1 - start) * len(ids[order[end]]) <= TOKEN_BUDGET:
                end += 1
            part = order[start:end]
            vectors.update(zip(part, run([ids[index] for index in part]), strict=True))
            start = end
        return np.array([vectors[index] for index in range(len(ids))])

    return embed


ENGINES: dict[str, Callable[[argparse.Namespace], Any]] = {
    "ours": lambda given: Ours(given.model, {}),
    "ours f32": lambda given: Ours(given.model, F32),
    "genai": lambda given: genai(given.model, {}),
    "genai f32": lambda given: genai(given.model, F32),
    "genai sorted": lambda given: genai(given.model, {}, is_sorted=True),
    "dynamic sorted": lambda given: dynamic(given.model, {}),
    "st torch": lambda given: sentence_transformers(given.sentence_transformers or given.model, "torch"),
    "st openvino": lambda given: sentence_transformers(given.model, "openvino"),
}


def serve(given: argparse.Namespace) -> None:
    """Be one engine: answer each line of JSON, a number of clients or of texts to embed at once, by its figures."""
    begin = time.perf_counter()
    engine = ENGINES[given.serve](given)
    texts = texts_of_docs()
    sample = engine(texts[:64])
    print(
        json.dumps({"load": time.perf_counter() - begin, "vectors": np.asarray(sample, np.float64).tolist()}),
        flush=True,
    )
    for line in sys.stdin:
        job = json.loads(line)
        if job["at_once"]:
            begin, cpu = time.perf_counter(), time.process_time()
            getattr(engine, "encode", engine)(texts)
            seconds = time.perf_counter() - begin
            print(json.dumps({"rate": len(texts) / seconds, "cpu": time.process_time() - cpu}), flush=True)
        else:
            print(json.dumps(lockstep(engine, texts, job["clients"], job["offset"])), flush=True)


def lockstep(engine: Embed, texts: Sequence[str], clients: int, offset: int) -> dict[str, float]:
    """Embed lists of ``clients`` texts for ``SECONDS``, the next list after the answer to the last one."""
    source = islice(cycle(texts), offset, None)
    times: list[float] = []
    while sum(times) < SECONDS or len(times) < 3:
        batch = list(islice(source, clients))
        begin = time.perf_counter()
        engine(batch)
        times.append(time.perf_counter() - begin)
    ordered = sorted(times)
    return {
        "rate": clients * len(times) / sum(times),
        "p50": statistics.median(times) * 1e3,
        "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] * 1e3,
    }


class Process:
    """An engine in a process of its own."""

    def __init__(self, name: str, given: argparse.Namespace) -> None:
        more = ["--sentence-transformers", given.sentence_transformers] if given.sentence_transformers else []
        self.process = subprocess.Popen(
            [sys.executable, __file__, given.model, *more, "--serve", name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.first = self._answer()

    def ask(self, **job: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)
        found = self._answer()
        if found is None:
            sys.exit("an engine has died")
        return found

    def _answer(self) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


def compare(given: argparse.Namespace) -> dict[str, Any]:
    """Run all engines in turns, and return the figures of each."""
    with ExitStack() as stack:
        engines: dict[str, Process] = {}
        for name in given.engines:
            process = Process(name, given)
            stack.callback(process.close)
            if process.first is None:
                print(f"{name}: not installed, or it cannot run this model: left out")
            else:
                engines[name] = process
        reference = np.array(next(iter(engines.values())).first["vectors"])  # type: ignore[index]
        result: dict[str, Any] = {}
        for name, process in engines.items():
            vectors = np.array(process.first["vectors"])  # type: ignore[index]
            cosine = float((reference * vectors).sum(1).min())
            result[name] = {"load": process.first["load"], "cosine": cosine, "rounds": []}  # type: ignore[index]
        for turn in range(given.rounds):
            for name, process in list(engines.items())[:: 1 if turn % 2 == 0 else -1]:
                found = {str(c): process.ask(at_once=False, clients=c, offset=turn * 7) for c in given.clients}
                found["all"] = process.ask(at_once=True)
                result[name]["rounds"].append(found)
    return result


def show(result: dict[str, Any], clients: Sequence[int]) -> None:
    """Print texts per second, with p50 in ms, and the median of the paired ratios of ours to each engine."""
    columns = [*map(str, clients), "all"]
    print("| engine | least cosine | load, s | " + " | ".join(f"{c} at once" for c in columns) + " |")
    print("|---" * (3 + len(columns)) + "|")
    for name, figures in result.items():
        cells = []
        for column in columns:
            rate = statistics.median(turn[column]["rate"] for turn in figures["rounds"])
            p50 = statistics.median(turn[column].get("p50", 0.0) for turn in figures["rounds"])
            ratio = statistics.median(
                own[column]["rate"] / turn[column]["rate"]
                for own, turn in zip(result["ours"]["rounds"], figures["rounds"], strict=True)
            )
            cells.append(f"{rate:.0f} ({p50:.1f} ms), ours {ratio:.2f} x" if p50 else f"{rate:.0f}, ours {ratio:.2f} x")
        print(f"| {name} | {figures['cosine']:.6f} | {figures['load']:.1f} | " + " | ".join(cells) + " |")


def beside(given: argparse.Namespace) -> dict[str, Any]:
    """Embed documents while one client decodes: on one engine, and as two pipelines that know nothing of each other."""
    from staticllm import StaticEmbeddingPipeline, StaticLLMPipeline

    texts = texts_of_docs()
    prompt = np.random.default_rng(1).integers(100, 1000, (1, 128))
    found: dict[str, Any] = {}
    with StaticLLMPipeline(given.beside, "CPU", PREFIX_CACHING=False) as llm:
        llm.wait_until_complete()
        for _ in range(3):
            llm.generate(prompt, max_new_tokens=32, ignore_eos=True)
        for name, engine in (("shared", llm.engine), ("separate", None)):
            with StaticEmbeddingPipeline(given.model, "CPU", engine=engine) as embedder:
                embedder.encode(texts[:200])
                found[name] = [beside_once(llm, embedder, texts, prompt) for _ in range(given.rounds)]
    return found


def beside_once(llm: Any, embedder: Any, texts: list[str], prompt: np.ndarray) -> dict[str, float]:
    """Return rates, gaps and first tokens alone and together."""
    begin = time.perf_counter()
    embedder.encode(texts[:300])
    alone = 300 / (time.perf_counter() - begin)
    ttft, tpot, _ = stream(llm, prompt, 32)
    done, stop = [0], threading.Event()

    def bulk() -> None:
        for start in cycle(range(0, len(texts) - 64, 64)):
            if stop.is_set():
                return
            embedder.encode(texts[start : start + 64])
            done[0] += 64

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(bulk) for _ in range(3)]
        time.sleep(0.5)
        ttft_beside, _, _ = stream(llm, prompt, 2)
        first, begin = done[0], time.perf_counter()
        _, tpot_beside, gap = stream(llm, prompt, 100)
        rate = (done[0] - first) / (time.perf_counter() - begin)
        query = time.perf_counter()
        embedder.embed_query("what is a KV slot?")
        query = time.perf_counter() - query
        stop.set()
        for each in running:
            each.result()
    return {
        "embedding share": rate / alone, "texts/s alone": alone, "TTFT ratio": ttft_beside / ttft, "TPOT alone, ms": tpot * 1e3,
        "TPOT beside, ms": tpot_beside * 1e3, "longest gap, ms": gap * 1e3, "query, ms": query * 1e3,
    }  # fmt: skip


def stream(llm: Any, prompt: np.ndarray, count: int) -> tuple[float, float, float]:
    """Return the time to the first token, the mean time per later token and the longest, in seconds."""
    begin = time.perf_counter()
    moments = [time.perf_counter() for _ in llm.submit(prompt, max_new_tokens=count, ignore_eos=True).tokens()]
    gaps = [after - before for before, after in pairwise(moments)]
    return moments[0] - begin, statistics.mean(gaps), max(gaps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of an OpenVINO embedding model with mean pooling and its tokenizer")
    parser.add_argument("--sentence-transformers", help="folder of the same model for sentence-transformers")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--clients", nargs="+", type=int, default=list(CLIENTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", help="folder of a language model: measure a chat beside documents")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given)
        return
    result = beside(given) if given.beside else compare(given)
    if given.beside:
        for name, rounds in result.items():
            medians = {key: statistics.median(turn[key] for turn in rounds) for key in rounds[0]}
            print(name, "  ".join(f"{key} {value:.2f}" for key, value in medians.items()))
    else:
        show(result, given.clients)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
