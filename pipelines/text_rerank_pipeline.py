"""``StaticRerankPipeline`` takes the place of ``openvino_genai.TextRerankPipeline``: it sorts texts by a query."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import openvino_genai as genai
from numpy.typing import NDArray

from staticllm.errors import ConfigError, ModelError, PromptError
from staticllm.model_dir import check_model_dir
from staticllm.pipelines.embedding.embedding_queue import EmbeddingQueue
from staticllm.pipelines.embedding.embedding_request import EmbeddingRequest
from staticllm.pipelines.embedding.load import EncoderChoices, LoadedEncoder, load_encoder
from staticllm.pipelines.embedding.text_tokenizer import Overflow, TextTokenizer
from staticllm.pipelines.engine.job_engine import JobEngine
from staticllm.pipelines.engine.jobs import JobHost, checked_host
from staticllm.threads import close_when_collected

Scores = NDArray[np.float32]
Ranking = list[tuple[int, float]]
QUERY_PRIORITY = 1
"""The default priority of a query; that of documents to embed is 0."""


@dataclass
class RerankConfig:
    """The options of ``openvino_genai.TextRerankPipeline.Config``; None for what the model's files say.

    Attributes:
        top_n: The number of texts that ``rerank`` returns.
        max_length: The most tokens of a query with a text; longer texts are truncated.
        pad_to_max_length, padding_side: Accepted and ignored: texts are packed, not padded.
    """

    top_n: int = 3
    max_length: int | None = None
    pad_to_max_length: bool | None = None
    padding_side: str | None = None

    def validate(self) -> None:
        """Check the values.

        Raises:
            ConfigError: a value is impossible.
        """
        if not _is_count(self.top_n):
            raise ConfigError(f"top_n={self.top_n!r}: must be a whole number from 1")
        if self.max_length is not None and not _is_count(self.max_length):
            raise ConfigError(f"max_length={self.max_length!r}: must be a whole number from 1, or None")


class RerankHandle:
    """The ranking of texts that were submitted: ``result`` waits for it, ``await`` too, and ``cancel`` gives it up."""

    def __init__(self, request: EmbeddingRequest, top_n: int, num_labels: int) -> None:
        self._request, self._top_n, self._num_labels = request, top_n, num_labels

    def result(self, timeout: float | None = None) -> Ranking:
        """Return the indices of the best texts and their scores, the best first.

        Raises:
            StaticLLMError: a text failed, or its deadline passed.
            TimeoutError: it took longer than ``timeout`` seconds.
            concurrent.futures.CancelledError: it was cancelled.
        """
        return ranking(probabilities(self._request.future.result(timeout), self._num_labels), self._top_n)

    def cancel(self) -> bool:
        """Give the ranking up. Return whether that was possible: False if it was there already."""
        return self._request.future.cancel()

    def __await__(self) -> Generator[Any, None, Ranking]:
        yield from asyncio.wrap_future(self._request.future).__await__()
        return self.result(0)


class StaticRerankPipeline:
    """Sorts texts by a cross-encoder, or by a causal language model that answers "yes" or "no", on a device of fixed shapes.

    Any number of threads may call its methods.
    """

    Config = RerankConfig

    def __init__(
        self,
        models_path: str | os.PathLike[str],
        device: str = "CPU",
        config: RerankConfig | genai.TextRerankPipeline.Config | None = None,
        *,
        engine: JobHost | None = None,
        overflow: Overflow = "truncate",
        max_waiting: int = 1 << 20,
        score_words: tuple[str, str] = ("no", "yes"),
        **properties: object,
    ) -> None:
        """Load a reranker with its tokenizer.

        Args:
            models_path: The folder of an OpenVINO model (text-classification, or text-generation for a causal language model)
                with its tokenizer.
            device: The OpenVINO device.
            config: Options as for GenAI; fields of it can also be given as keywords.
            engine: The engine of another pipeline on the same device, as for ``StaticEmbeddingPipeline``.
            overflow: Whether texts that do not fit into ``max_length`` with their query are truncated or refused.
            max_waiting: The most texts that may wait.
            score_words: The tokens for a bad and for a good text, if the model is a causal language model.
            properties: OpenVINO's properties of the device, and fields of ``Config``.

        Raises:
            ModelError: a file of the model is missing or damaged, it cannot be lowered, or it gives no scores.
            ConfigError: an option is impossible.
            DeviceError: the device cannot compile or run the model.
        """
        if overflow not in ("truncate", "refuse"):
            raise ConfigError(f"overflow={overflow!r}: must be 'truncate' or 'refuse'")
        host = None if engine is None else checked_host(engine)
        names = {item.name for item in fields(RerankConfig)}
        own = {name: properties.pop(name) for name in list(properties) if name in names}
        self._config = _resolved(config, own)
        directory = check_model_dir(models_path)
        tokenizer = _paired_tokenizer(directory)
        tokens = _tokens(tokenizer, score_words)
        choices = EncoderChoices("last", False, self._config.max_length, None, properties or None, tokens)
        loaded = load_encoder(directory, device, choices)
        self._num_labels = _num_labels(loaded, score_words)
        self._is_paired = loaded.runner.shape.output == "scores" and tokenizer.supports_paired_input()
        self._tokenizer = TextTokenizer(tokenizer, loaded.max_length, loaded.vocab_size, overflow)
        self._queue = EmbeddingQueue(loaded.runner, max_waiting)
        self._own_engine = JobEngine() if host is None else None
        self._engine: JobHost = self._own_engine or checked_host(host)
        self._engine.add_jobs(self._queue)
        self._close = partial(_close, self._engine, self._queue, self._own_engine)
        close_when_collected(self, self._close)
        self._started: EmbeddingRequest | None = None

    def rerank(self, query: str, texts: Sequence[str]) -> Ranking:
        """Return the indices of the ``top_n`` best texts and their scores from 0 to 1, the best first.

        Raises:
            StaticLLMError: a text cannot be scored; the message has its index.
        """
        return ranking(self.scores(query, texts), self._config.top_n)

    def scores(
        self,
        query: str,
        texts: Sequence[str],
        *,
        priority: int = QUERY_PRIORITY,
        deadline_ms: float | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Scores:
        """Return the score of each text, ``[n]``, from 0 to 1.

        Args:
            query: What the texts should answer.
            texts: Any number of texts.
            priority: Texts of a higher priority are run first.
            deadline_ms: The time from now after which texts are given up.
            on_progress: A function that gets the number of texts that are done, and of all texts, on the caller's thread.

        Raises:
            StaticLLMError: a text cannot be scored, or the deadline passed.
        """
        request = self._request(query, texts, priority, deadline_ms)
        if not request.texts:
            return np.zeros(0, np.float32)
        self._queue.submit(request)
        return probabilities(request.wait(on_progress), self._num_labels)

    def submit(
        self, query: str, texts: Sequence[str], *, priority: int = QUERY_PRIORITY, deadline_ms: float | None = None
    ) -> RerankHandle:
        """Submit texts and return at once.

        Raises:
            PromptError: a text is not valid.
            BusyError: too many texts wait.
        """
        request = self._submitted(self._request(query, texts, priority, deadline_ms))
        return RerankHandle(request, self._config.top_n, self._num_labels)

    def start_rerank_async(self, query: str, texts: Sequence[str]) -> None:
        """Begin to rank texts; ``wait_rerank`` returns the ranking.

        Raises:
            StaticLLMError: a text is not valid, or too many wait.
        """
        self._started = self._submitted(self._request(query, texts, QUERY_PRIORITY, None))

    def wait_rerank(self) -> Ranking:
        """Return the ranking that was begun last.

        Raises:
            StaticLLMError: a text could not be scored, or no ranking was begun.
        """
        request, self._started = self._started, None
        if request is None:
            raise ConfigError("no ranking was begun: call start_rerank_async first")
        return ranking(probabilities(request.wait(), self._num_labels), self._config.top_n)

    @property
    def engine(self) -> JobHost:
        """The engine that owns the device, for other pipelines on the same device."""
        return self._engine

    def close(self) -> None:
        """Release the device; texts that wait get a ``ClosedError``. An engine that was given goes on."""
        self._close()

    def __enter__(self) -> StaticRerankPipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submitted(self, request: EmbeddingRequest) -> EmbeddingRequest:
        if request.texts:
            self._queue.submit(request)
        else:
            request.future.set_result(request.vectors)
        return request

    def _request(self, query: str, texts: Sequence[str], priority: int, deadline_ms: float | None) -> EmbeddingRequest:
        if isinstance(texts, str):
            raise ConfigError("texts is a str: must be a list of str")
        if not isinstance(query, str):
            raise PromptError(f"the query is a {type(query).__name__}: must be a str")
        given = list(texts)
        if self._is_paired:
            tokens = self._tokenizer.encode_pairs(query, given)
        else:  # as GenAI: the caller has written a prompt around both
            tokens = self._tokenizer.encode([query + text if isinstance(text, str) else text for text in given])
        deadline = None if deadline_ms is None else time.perf_counter() + deadline_ms / 1e3
        return EmbeddingRequest(tokens, self._queue.runner.shape.width, priority, deadline)


def _close(engine: JobHost, queue: EmbeddingQueue, own_engine: JobEngine | None) -> None:
    engine.remove_jobs(queue)
    if own_engine is not None:
        own_engine.close()


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def probabilities(logits: Scores, num_labels: int) -> Scores:
    """Return the score ``[n]`` of each row of ``logits [n, labels]``: the sigmoid of one label, or the share of the second."""
    values = logits.astype(np.float64)
    if num_labels == 1:
        return np.asarray(1 / (1 + np.exp(-values[:, 0])), np.float32)
    weights = np.exp(values - values.max(axis=1, keepdims=True, initial=-np.inf))
    return np.asarray(weights[:, 1] / weights.sum(axis=1), np.float32)


def ranking(scores: Scores, top_n: int) -> Ranking:
    """Return the indices and values of the ``top_n`` highest scores; of equal ones the first."""
    best = np.argsort(-scores, kind="stable")[:top_n]
    return [(int(index), float(scores[index])) for index in best]


def _paired_tokenizer(directory: os.PathLike[str]) -> genai.Tokenizer:
    """Return the tokenizer with a second input for the text, if its post-processing is known, else without one."""
    try:
        return genai.Tokenizer(directory, add_second_input=True)
    except RuntimeError:
        return genai.Tokenizer(directory)


def _tokens(tokenizer: genai.Tokenizer, words: tuple[str, str]) -> tuple[int, ...]:
    """Return the ids of the two words; none if one of them is not a single token."""
    ids = [_ids_of(tokenizer, word) for word in words]
    return tuple(found[0] for found in ids) if all(len(found) == 1 for found in ids) else ()


def _ids_of(tokenizer: genai.Tokenizer, word: str) -> list[int]:
    found: list[int] = tokenizer.encode(word, add_special_tokens=False).input_ids.data[0].tolist()
    return found


def _num_labels(loaded: LoadedEncoder, words: tuple[str, str]) -> int:
    """Return the number of scores per text.

    Raises:
        ModelError: the model gives none.
    """
    shape = loaded.runner.shape
    if shape.output == "scores" or shape.head == "tokens":
        return shape.width
    if shape.head == "cut":
        raise ModelError(
            f"{words[0]!r} or {words[1]!r} is not a single token: give words of this model's vocabulary by score_words="
        )
    raise ModelError(
        "the model gives hidden states and no scores: export it with --task text-classification, or embed with "
        "StaticEmbeddingPipeline"
    )


def _resolved(config: object, own: Mapping[str, object]) -> RerankConfig:
    """Return the config with the keywords in it.

    Raises:
        ConfigError: a value is impossible.
    """
    if isinstance(config, genai.TextRerankPipeline.Config):
        config = RerankConfig(**{item.name: getattr(config, item.name) for item in fields(RerankConfig)})
    elif config is None:
        config = RerankConfig()
    elif not isinstance(config, RerankConfig):
        raise ConfigError(f"config is a {type(config).__name__}: must be a StaticRerankPipeline.Config")
    found = RerankConfig(**{**vars(config), **own})
    found.validate()
    return found
