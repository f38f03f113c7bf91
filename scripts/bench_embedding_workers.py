"""Runs each engine of ``bench_embedding.py`` in a process of its own, with the jobs and the protocol of ``bench_workers.py``.

An engine that takes lists gets the texts of all clients at once; ours gets them one by one, as its clients send them.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bench_workers
import numpy as np
from bench_embedding_texts import texts as make_texts

if TYPE_CHECKING:  # other engines run without our package
    from staticllm.pipelines.embedding.encoder_runner import EncoderRunner

BATCH_TEXTS, BUDGET = 16, 512
NUM_CHECKED, BULK_TEXTS, STREAM_TOKENS = 32, 64, 120
LATENCY = {"PERFORMANCE_HINT": "LATENCY"}
PEAK_ROWS = 1024


class Worker(bench_workers.Worker):
    """A process that has loaded one engine."""

    script = __file__


class Engine:
    """An engine that embeds lists of texts."""

    def __init__(self, path: str, properties: dict[str, Any], threads: int) -> None:
        self.threads = threads
        self.load(path, properties)

    def load(self, path: str, properties: dict[str, Any]) -> None:
        raise NotImplementedError

    def embed(self, texts: list[str]) -> np.ndarray:
        """Return the vectors ``[n, width]``."""
        raise NotImplementedError

    def vectors(self) -> dict[str, Any]:
        """Return the vectors of the texts by which engines are compared."""
        return {"vectors": np.asarray(self.embed(make_texts(NUM_CHECKED))).astype(float).tolist()}

    def clients(self, count: int, batches: int, seed: int) -> dict[str, Any]:
        """Let ``count`` clients send one text each, all at once, ``batches`` times; the next time begins after all answers."""
        texts = make_texts(count * batches, seed)
        begin, seconds = time.perf_counter(), list[float]()
        for number in range(batches):
            seconds += self.lockstep(texts[number * count : (number + 1) * count])
        return {"texts_per_second": len(texts) / (time.perf_counter() - begin), "ms": [1e3 * each for each in seconds]}

    def lockstep(self, texts: list[str]) -> list[float]:
        """Return the seconds until each text has its vector."""
        begin = time.perf_counter()
        self.embed(texts)
        return [time.perf_counter() - begin] * len(texts)

    def memory(self) -> dict[str, Any]:
        import psutil

        return {"mb": psutil.Process().memory_full_info().uss / 1e6}


class Ours(Engine):
    """StaticEmbeddingPipeline; texts arrive one by one."""

    def load(self, path: str, properties: dict[str, Any]) -> None:
        from staticllm import StaticEmbeddingPipeline
        from staticllm.pipelines.embedding.encoder_runner import EncoderProgram

        self._pipe = StaticEmbeddingPipeline(path, "CPU", INFERENCE_NUM_THREADS=self.threads, **properties)
        self._calls: list[tuple[float, int, int]] = []  # seconds, tokens of texts, rows
        self._path = Path(path)
        run: Callable[..., float] = EncoderProgram.run
        runner, calls = self._runner, self._calls
        run_texts, last = runner.run, [0.0]

        def timed(*arguments: Any) -> float:
            last[0] = run(*arguments)
            return last[0]

        def counted(variant: Any, sequences: Any, *more: Any) -> Any:
            vectors = run_texts(variant, sequences, *more)
            calls.append(
                (last[0], sum(len(text) for texts in sequences for text in texts), variant.batch * variant.rows)
            )
            return vectors

        EncoderProgram.run = timed  # type: ignore[method-assign,assignment]
        runner.run = counted  # type: ignore[method-assign,assignment]

    @property
    def _runner(self) -> EncoderRunner:
        from staticllm.pipelines.embedding.queue.drivers import JobDriver

        assert isinstance(self._pipe._driver, JobDriver)
        return self._pipe._driver.runner

    def embed(self, texts: list[str]) -> np.ndarray:
        return self._pipe.encode(texts)

    def lockstep(self, texts: list[str]) -> list[float]:
        begin, ends = time.perf_counter(), list[float]()
        handles = [self._pipe.submit(text) for text in texts]
        for handle in handles:
            handle.future.add_done_callback(lambda _: ends.append(time.perf_counter() - begin))
        for handle in handles:
            handle.result()
        return ends

    def bulk(self, count: int, seed: int) -> dict[str, Any]:
        """Embed ``count`` texts in one call: the share of rows that hold tokens, and the share of time outside the device."""
        texts = make_texts(count, seed)
        self._calls.clear()
        begin = time.perf_counter()
        self._pipe.encode(texts)
        seconds = time.perf_counter() - begin
        device, tokens, rows = (sum(column) for column in zip(*self._calls, strict=True))
        return {"texts_per_second": count / seconds, "fill": tokens / rows, "host": 1 - device / seconds}

    def peak(self) -> dict[str, Any]:
        """Return the GFLOP/s of a call of the most rows of 128, and of the plugin's products of these matrices alone."""
        runner = self._runner
        variant = max((v for v in runner.variants if v.rows == 128), key=lambda v: v.batch)
        ids = [np.full(128, 1000, np.int64)]
        from staticllm.compiler_passes.lower_encoder import lower_encoder
        from staticllm.devices import get_core
        from staticllm.pipelines.embedding.packing.tokenized_text import TokenizedText

        sequences = [[TokenizedText(ids[0])] for _ in range(variant.batch)]
        self._calls.clear()
        for _ in range(8):
            runner.run(variant, sequences)
        seconds = min(call[0] for call in self._calls[1:])
        model = lower_encoder(get_core().read_model(self._path / "openvino_model.xml")).specialise(variant)
        return {"gflops": flops_of(model) / seconds / 1e9, "peak": product_gflops(self._pipe.width, self._precision(),
                self.threads), "shape": f"[{variant.batch},128]"}  # fmt: skip

    def _precision(self) -> str:
        compiled: Any = next(iter(self._runner._compiled.values()))
        return str(compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name())


class OursList(Ours):
    """StaticEmbeddingPipeline; all texts come in one call."""

    lockstep = Engine.lockstep


class Genai(Engine):
    """TextEmbeddingPipeline of openvino_genai with mean pooling, which it does not read from the model's files."""

    def load(self, path: str, properties: dict[str, Any]) -> None:
        import openvino_genai as genai

        self._is_sorted = properties.pop("sorted", False)
        kind = genai.TextEmbeddingPipeline
        config = kind.Config()
        config.pooling_type, config.normalize, config.max_length = kind.PoolingType.MEAN, True, 256
        self._pipe = kind(path, "CPU", config, INFERENCE_NUM_THREADS=self.threads, **properties)

    def embed(self, texts: list[str]) -> np.ndarray:
        if not self._is_sorted or len(texts) <= BATCH_TEXTS:
            return np.asarray(self._pipe.embed_documents(texts), np.float32)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        found: list[Any] = [None] * len(texts)
        for start in range(0, len(order), BATCH_TEXTS):
            part = order[start : start + BATCH_TEXTS]
            for index, vector in zip(part, self._pipe.embed_documents([texts[i] for i in part]), strict=True):
                found[index] = vector
        return np.asarray(found, np.float32)


class SentenceTransformers(Engine):
    """sentence-transformers with torch or with OpenVINO."""

    def load(self, path: str, properties: dict[str, Any]) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(self.threads)
        if properties.pop("backend") == "torch":
            self._model = SentenceTransformer(str(Path(path) / "torch"), device="cpu")
        else:
            config = {**LATENCY, "INFERENCE_NUM_THREADS": str(self.threads), **properties}
            options = {"device": "CPU", "ov_config": config}
            self._model = SentenceTransformer(path, backend="openvino", device="cpu", model_kwargs=options)

    def embed(self, texts: list[str]) -> np.ndarray:
        return np.asarray(self._model.encode(texts, batch_size=32, normalize_embeddings=True, show_progress_bar=False))


class FastEmbed(Engine):
    """fastembed with a model of one's own."""

    def load(self, path: str, properties: dict[str, Any]) -> None:
        from fastembed import TextEmbedding
        from fastembed.common.model_description import ModelSource, PoolingType

        width = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))["hidden_size"]
        TextEmbedding.add_custom_model(
            "bench/encoder", PoolingType.MEAN, True, ModelSource(url="http://localhost/none"), width, "model.onnx"
        )
        self._model = TextEmbedding("bench/encoder", specific_model_path=str(Path(path) / "onnx"), threads=self.threads)

    def embed(self, texts: list[str]) -> np.ndarray:
        return np.asarray(list(self._model.embed(texts, batch_size=256)), np.float32)


class RawOpenVINO(Engine):
    """A dynamic OpenVINO model; texts are sorted by length and divided into batches of at most ``BUDGET`` padded tokens."""

    def load(self, path: str, properties: dict[str, Any]) -> None:
        import openvino as ov
        from tokenizers import Tokenizer

        config = {**LATENCY, "INFERENCE_NUM_THREADS": self.threads, **properties}
        self._request = ov.Core().compile_model(Path(path) / "openvino_model.xml", "CPU", config).create_infer_request()
        self._tokenizer = Tokenizer.from_file(str(Path(path) / "torch" / "tokenizer.json"))
        self._tokenizer.enable_truncation(256)

    def embed(self, texts: list[str]) -> np.ndarray:
        tokens = [each.ids for each in self._tokenizer.encode_batch(texts)]
        order = sorted(range(len(texts)), key=lambda i: -len(tokens[i]))
        found: list[Any] = [None] * len(texts)
        while order:
            count = max(1, BUDGET // len(tokens[order[0]]))
            part, order = order[:count], order[count:]
            for index, vector in zip(part, self._run([tokens[i] for i in part]), strict=True):
                found[index] = vector
        return np.asarray(found, np.float32)

    def _run(self, batch: list[list[int]]) -> np.ndarray:
        ids = np.zeros((len(batch), max(map(len, batch))), np.int64)
        mask = np.zeros_like(ids)
        for line, tokens in enumerate(batch):
            ids[line, : len(tokens)], mask[line, : len(tokens)] = tokens, 1
        feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        hidden = self._request.infer(feeds, share_inputs=True, share_outputs=True)[0]
        pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        return pooled / np.linalg.norm(pooled, axis=1, keepdims=True)


def flops_of(model: Any) -> float:
    """Return the floating-point operations of the matrix products of a static model."""
    found = 0
    for node in model.get_ordered_ops():
        if node.get_type_name() == "MatMul":
            left = list(node.input(0).get_shape())
            inner = left[-2 if node.get_attributes()["transpose_a"] else -1]
            found += 2 * int(np.prod(node.output(0).get_shape())) * inner
        elif node.get_type_name() == "ScaledDotProductAttention":
            query, keys = list(node.input(0).get_shape()), list(node.input(1).get_shape())
            found += 4 * int(np.prod(query)) * keys[-2]
    return float(found)


def product_gflops(width: int, precision: str, threads: int) -> float:
    """Return the best GFLOP/s of a product ``[1024, width] x [width, 4 width]`` in the plugin, repeated in a chain."""
    import openvino as ov
    from openvino import opset13 as ops

    random = np.random.default_rng(0)
    rows = ops.parameter([PEAK_ROWS, width], np.float32)
    node: Any = rows
    for number in range(8):
        shape = (width, 4 * width) if number % 2 == 0 else (4 * width, width)
        node = ops.matmul(
            node, ops.constant(random.standard_normal(shape, np.float32) * np.float32(0.02)), False, False
        )
    config = {**LATENCY, "INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads}
    request = ov.Core().compile_model(ov.Model([node], [rows]), "CPU", config).create_infer_request()
    seconds = []
    for _ in range(6):
        begin = time.perf_counter()
        request.infer([random.standard_normal((PEAK_ROWS, width), np.float32)])
        seconds.append(time.perf_counter() - begin)
    return 8 * 2 * PEAK_ROWS * width * 4 * width / min(seconds) / 1e9


KINDS = {"ours": Ours, "ours list": OursList, "genai": Genai, "st": SentenceTransformers, "fastembed": FastEmbed,
         "raw": RawOpenVINO}  # fmt: skip


def main() -> None:
    what = json.loads(sys.argv[1])
    properties = dict(what["properties"])
    threads = properties.pop("threads")
    begin = time.perf_counter()
    if what["kind"].startswith("chat"):
        from bench_embedding_chat import Chat

        engine: Any = Chat(what["path"], what["kind"] == "chat shared", threads, properties.get("chat"))
    else:
        engine = KINDS[what["kind"]](what["path"], properties, threads)
    print(json.dumps({"seconds": time.perf_counter() - begin, "later_seconds": 0.0}), flush=True)
    try:
        for line in sys.stdin:
            job = json.loads(line)
            print(json.dumps(getattr(engine, job.pop("job"))(**job)), flush=True)
    finally:
        if hasattr(engine, "close"):
            engine.close()


def is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
