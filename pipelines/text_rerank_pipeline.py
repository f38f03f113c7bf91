"""``StaticRerankPipeline`` takes the place of ``openvino_genai.TextRerankPipeline``: it sorts texts by a query."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import openvino_genai as genai
from numpy.typing import NDArray

from staticllm.config import one_of
from staticllm.core import OnProgress
from staticllm.errors import ConfigError, ModelError, PromptError, shown
from staticllm.model_files.model_at import check_model_dir
from staticllm.system.signal_stack import kept_signal_stack

from .embedding.embedding_config import RerankConfig, resolved_config
from .embedding.embedding_request import EmbeddingRequest
from .embedding.encoder_files import read_encoder_files
from .embedding.encoder_kind import EncoderChoices
from .embedding.pool.instances import EncoderInfo
from .embedding.pool.served_encoder import ServingOptions
from .embedding.score_activation import ACTIVATIONS, Activation, activated, chosen_activation
from .embedding.text_tokenizer import Overflow
from .encoder_pipeline import QUERY_PRIORITY, EncoderHandle, EncoderPipeline, OnTexts
from .engine.jobs import JobHost

SCORE_WORDS = ("no", "yes")
Scores = NDArray[np.float32]
Ranking = list[tuple[int, float]]


class RerankHandle(EncoderHandle[Ranking]):
    """The ranking of texts that were submitted: ``result`` waits for it, ``await`` too, and ``cancel`` gives it up.

    It has the indices of the best texts and their scores, the best first.
    """

    _pipeline: StaticRerankPipeline

    def scores(self, timeout: float | None = None) -> Scores:
        """Return the score of each text, ``[n]``, in the order of the texts.

        Raises:
            StaticLLMError, TimeoutError, concurrent.futures.CancelledError: as for ``result``.
        """
        return self._pipeline._scored(self.future.result(timeout))


class StaticRerankPipeline(EncoderPipeline):
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
        activation: Activation | None = None,
        score_words: tuple[str, str] | None = None,
        on_progress: OnProgress | None = None,
        **properties: object,
    ) -> None:
        """Load a reranker with its tokenizer.

        Args:
            models_path: The folder of an OpenVINO model (text-classification, or text-generation for a causal language model)
                with its tokenizer.
            device: The OpenVINO device, or several: ``NPU,CPU``, or groups of cores, ``CPU#0-3,CPU#4-7``.
            config: Options as for GenAI; fields of it can also be given as keywords.
            engine: The engine of another pipeline on the same device, as for ``StaticEmbeddingPipeline``.
            overflow: Whether texts that do not fit into ``max_length`` with their query are truncated or refused.
            max_waiting: The most texts that may wait.
            activation: What makes scores of logits: ``sigmoid``, ``identity`` or ``softmax``. None: what the model's files say to
                sentence-transformers' CrossEncoder; without that the sigmoid of one label, or the softmax of several.
            score_words: The tokens for a bad and for a good text, if the model is a causal language model. None: those of
                sentence-transformers' ``LogitScore``, else ``no`` and ``yes``.
            on_progress: Is called with each part of loading.
            properties: OpenVINO's properties of the device, fields of ``Config``, and those of ``StaticLLMPipeline`` about blobs
                (``CACHE_DIR``, ``BLOB_PATH`` …), ``PROGRAMS`` and ``WEIGHTS_PATH``, and those of several devices
                (docs/embeddings.md).

        Raises:
            ModelError: a file of the model is missing or damaged, it cannot be lowered, or it gives no scores.
            ConfigError: an option is unknown or impossible.
            DeviceError: the device is missing, or cannot compile or run the model.
            BlobError: the set at ``BLOB_PATH`` is damaged or was made for something else.
        """
        serving = ServingOptions(engine, overflow, max_waiting, on_progress)
        _check_scoring(activation, score_words)
        self._config = resolved_config(RerankConfig, config, properties)
        directory = check_model_dir(models_path)
        tokenizer = _paired_tokenizer(directory)
        words = score_words or SCORE_WORDS
        tokens = (() if score_words else read_encoder_files(directory).score_tokens) or _tokens(tokenizer, words)
        choices = EncoderChoices(
            pooling="last",
            is_normalised=False,
            max_length=self._config.max_length,
            score_tokens=tokens,
            names=(*vars(self._config), "activation", "score_words"),
        )
        super().__init__(directory, device, choices, serving, properties, tokenizer)
        info = self._served.info
        try:
            if score_words is not None and info.output == "scores":
                raise ConfigError(
                    f"score_words={shown(score_words)}: the words are for causal language models, this model gives scores "
                    "itself: leave them out"
                )
            self._activation: Activation = chosen_activation(activation, directory, _num_labels(info, words))
        except BaseException:
            self.close()
            raise
        self._is_paired = info.output == "scores" and tokenizer.supports_paired_input()

    @property
    def is_paired(self) -> bool:
        """Whether the tokenizer encodes a query and a text as a pair. If not, as in GenAI, the text is joined to the query."""
        return self._is_paired

    def rerank(self, query: str, texts: Sequence[str]) -> Ranking:
        """Return the indices of the ``top_n`` best texts and their scores, the best first.

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
        on_progress: OnTexts | None = None,
    ) -> Scores:
        """Return the score of each text, ``[n]``: from 0 to 1, unless the activation is ``identity``.

        A model with several labels gives the score of the second.

        Args:
            query: What the texts should answer.
            texts: Any number of texts.
            priority: Texts of a higher priority are run first.
            deadline_ms: The time from now after which texts are given up.
            on_progress: A function that gets the number of texts that are done, and of all texts, on the caller's thread.

        Raises:
            StaticLLMError: a text cannot be scored, or the deadline passed.
        """
        return self._scored(self._run(self._pairs(query, texts, priority, deadline_ms), on_progress))

    def label_scores(self, query: str, texts: Sequence[str]) -> Scores:
        """Return the scores of all labels, ``[n, labels]``: their softmax, if there are several and no activation is chosen.

        Raises:
            StaticLLMError: a text cannot be scored.
        """
        return activated(self._run(self._pairs(query, texts)), self._activation)

    def submit(
        self, query: str, texts: Sequence[str], *, priority: int = QUERY_PRIORITY, deadline_ms: float | None = None
    ) -> RerankHandle:
        """Submit texts and return at once.

        Raises:
            PromptError: a text is not valid.
            BusyError: too many texts wait.
        """
        return RerankHandle(self._submitted(self._pairs(query, texts, priority, deadline_ms)), self, self._ranked)

    def start_rerank_async(self, query: str, texts: Sequence[str]) -> None:
        """Begin to rank texts; ``wait_rerank`` returns the ranking.

        Raises:
            StaticLLMError: a text is not valid, or too many wait.
        """
        self._begin("ranking", self._pairs(query, texts))

    def wait_rerank(self) -> Ranking:
        """Return the ranking that was begun last.

        Raises:
            StaticLLMError: a text could not be scored, or no ranking was begun.
        """
        return self._ranked(self._end("ranking", "start_rerank_async"))

    def _ranked(self, logits: Scores) -> Ranking:
        return ranking(self._scored(logits), self._config.top_n)

    def _scored(self, logits: Scores) -> Scores:
        """Return the score ``[n]`` of each row of ``logits [n, labels]``: that of the only label, or of the second."""
        scores = activated(logits, self._activation)
        return scores[:, 0 if scores.shape[1] == 1 else 1]

    def _pairs(
        self,
        query: str,
        texts: Sequence[str],
        priority: int = QUERY_PRIORITY,
        deadline_ms: float | None = None,
    ) -> EmbeddingRequest:
        given = self._check_call(texts, priority, deadline_ms)
        if not isinstance(query, str):
            raise PromptError(f"the query is a {type(query).__name__}: must be a str")
        if self._is_paired:
            tokens = self._tokenizer.encode_pairs(query, given)
        else:  # as GenAI: the caller has written a prompt around both
            tokens = self._tokenizer.encode([query + text if isinstance(text, str) else text for text in given])
        return self._request(tokens, priority, deadline_ms)


def ranking(scores: Scores, top_n: int) -> Ranking:
    """Return the indices and values of the ``top_n`` highest scores; of equal ones the first."""
    best = np.argsort(-scores, kind="stable")[:top_n]
    return [(int(index), float(scores[index])) for index in best]


def _paired_tokenizer(directory: os.PathLike[str]) -> genai.Tokenizer:
    """Return the tokenizer with a second input for the text, if its post-processing is known, else without one."""
    with kept_signal_stack():
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


def _num_labels(info: EncoderInfo, words: tuple[str, str]) -> int:
    """Return the number of scores per text.

    Raises:
        ModelError: the model gives none.
    """
    if info.output == "scores" or info.head == "tokens":
        return info.width
    if info.head == "cut":
        raise ModelError(
            f"{shown(words[0])} or {shown(words[1])} is not a single token: give words of this model's vocabulary by score_words="
        )
    raise ModelError(
        "the model gives hidden states and no scores: export it with --task text-classification, or embed with "
        "StaticEmbeddingPipeline"
    )


def _check_scoring(activation: object, words: object) -> None:
    one_of("activation", activation, (None, *ACTIVATIONS))
    is_pair = isinstance(words, (tuple, list)) and len(words) == 2 and all(isinstance(word, str) for word in words)
    if words is not None and not is_pair:
        raise ConfigError(f"score_words={shown(words)}: must be two words, of a bad and of a good text")
