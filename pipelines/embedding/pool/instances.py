"""Instances of one encoder: each embeds texts on its own device, in this process or in a worker process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from staticllm.core import EncoderVariant
from staticllm.errors import DeviceError, as_ours

from ..encoder_job import LoadedEncoder
from ..encoder_runner import EncoderRunner, calls_of
from ..packing.chunks import ContinuedText
from ..packing.encoder_buffers import Vectors
from ..packing.tokenized_text import TokenizedText
from ..queue.loads import Costs

MAX_TEXTS = 1024
"""The most texts in one message to a worker process. Larger batches are divided."""


class WorkerLostError(DeviceError):
    """A worker process ended, or was ended because a call took too long. It can be started again."""


@dataclass(frozen=True)
class EncoderInfo:
    """What all instances of one encoder have in common; ``output`` and ``head`` are those of its ``EncoderShape``."""

    width: int
    """Values of a vector."""
    max_length: int
    """Tokens of a text."""
    vocab_size: int | None
    """Tokens that are known."""
    is_packable: bool
    output: Literal["embeddings", "scores"] = "embeddings"
    head: Literal["none", "cut", "tokens"] = "none"

    @classmethod
    def of(cls, loaded: LoadedEncoder) -> EncoderInfo:
        """Return the info of an encoder that was loaded in this process."""
        shape = loaded.runner.shape
        return cls(shape.width, loaded.max_length, loaded.vocab_size, shape.is_packable, shape.output, shape.head)


class Instance(Protocol):
    """One copy of the model on one device. One thread calls ``embed`` and ``recover``; any may call ``interrupt``."""

    name: str
    info: EncoderInfo

    @property
    def device_seconds(self) -> float | None:
        """Seconds of the device in all calls of ``embed``; None if nothing else runs on it during a call."""
        ...

    @property
    def costs(self) -> Costs:
        """Seconds per call of each variant, measured in the warm-up and followed since."""
        ...

    def embed(self, texts: Sequence[TokenizedText], priority: int = 0) -> Vectors:
        """Return the vectors ``[n, width]`` of the texts. One that is not finite belongs to a text that fails alone, too.

        Args:
            priority: The highest of the texts, for a device that others use as well.

        Raises:
            WorkerLostError: the worker process ended.
            Exception: the device failed.
        """
        ...

    def interrupt(self) -> bool:
        """End a call that takes too long, with a ``WorkerLostError`` in its thread. Return False if that is not possible."""
        ...

    def recover(self) -> None:
        """Make the instance usable after ``embed`` failed, or find out that it is.

        Raises:
            StaticLLMError: it is not usable.
        """
        ...

    def close(self) -> None:
        """Release the device. A second call does nothing."""
        ...


class LocalInstance:
    """An instance in this process."""

    device_seconds = None

    def __init__(self, name: str, runner: EncoderRunner, info: EncoderInfo) -> None:
        self.name = name
        self.info = info
        self._runner = runner

    @property
    def costs(self) -> Costs:
        """Seconds per call of each variant."""
        return costs_of(self._runner)

    def embed(self, texts: Sequence[TokenizedText], priority: int = 0) -> Vectors:
        """Return the vectors ``[n, width]`` of the texts."""
        return embed_texts(self._runner, texts)

    def interrupt(self) -> bool:
        """Return False: a call in this process cannot be ended."""
        return False

    def recover(self) -> None:
        """Embed a text of one token.

        Raises:
            DeviceError: the device fails for it, too.
        """
        try:
            self.embed([TokenizedText(np.zeros(1, np.int64))])
        except Exception as error:
            raise as_ours(error) from error

    def close(self) -> None:
        """Drop the programs, so that their memory and threads are given back at once."""
        self._runner.close()


def costs_of(runner: EncoderRunner) -> dict[EncoderVariant, float]:
    """Return the seconds per call of each variant."""
    costs = {variant: runner.cost(variant) for variant in runner.variants}
    most = runner.max_tokens
    if most > runner.max_rows:  # a text that runs in chunks counts like one in a call of its own
        for num_tokens in (*range(2 * runner.max_rows, most, runner.max_rows), most):
            costs[EncoderVariant(1, num_tokens, 1)] = runner.cost_of_text(num_tokens)
    return costs


def embed_texts(runner: EncoderRunner, texts: Sequence[TokenizedText]) -> Vectors:
    """Return the vectors ``[n, width]`` of texts in packed calls; those that are too long for them run in chunks.

    A text whose vector is not finite runs again without others, because one of those may be the cause.
    """
    vectors = np.zeros((len(texts), runner.shape.width), np.float32)
    calls = calls_of(runner, texts)
    for call in calls.packed:
        sequences = [[texts[index] for index in sequence] for sequence in call.sequences]
        vectors[list(call.texts)] = runner.run(call.variant, sequences)
    for index, chunk in calls.chunks.items():
        vectors[index] = _in_chunks(runner, chunk)
    if len(texts) > 1:
        for index in np.flatnonzero(~np.isfinite(vectors).all(axis=1)).tolist():
            vectors[index] = embed_texts(runner, [texts[index]])[0]
    return vectors


def _in_chunks(runner: EncoderRunner, chunk: ContinuedText) -> Vectors:
    while (vector := runner.run_chunk(chunk, runner.next_chunk(chunk))) is None:
        pass
    return vector


def encode_texts(texts: Sequence[TokenizedText]) -> tuple[dict[str, Any], bytes]:
    """Return texts as the body and the payload of a message."""
    typed = any(text.types is not None for text in texts)
    sizes = np.array([[len(text) for text in texts], [text.num_prompt for text in texts]], "<i4")
    columns = [sizes, *(text.ids.astype("<i8") for text in texts)]
    if typed:
        columns += [np.zeros(len(t), "<i8") if t.types is None else t.types.astype("<i8") for t in texts]
    return {"num_texts": len(texts), "has_types": typed}, b"".join(column.tobytes() for column in columns)


def decode_texts(header: Mapping[str, Any], body: bytes) -> Iterator[TokenizedText]:
    """Yield the texts of a message.

    Raises:
        ValueError: the sizes do not fit together.
    """
    num_texts = int(header["num_texts"])
    num_types = int(bool(header["has_types"]))
    sizes = np.frombuffer(body, "<i4", min(2 * num_texts, len(body) // 4))
    lengths = sizes[:num_texts]
    prompts = sizes[num_texts:]
    num_tokens = int(lengths.sum())
    if lengths.min(initial=1) < 1 or len(body) != 8 * num_texts + 8 * num_tokens * (1 + num_types):
        raise ValueError(f"a message of {len(body)} bytes with {num_texts} texts")
    values = np.frombuffer(body, "<i8", num_tokens * (1 + num_types), 8 * num_texts)
    start = 0
    for length, num_prompt in zip(lengths.tolist(), prompts.tolist(), strict=True):
        types = values[num_tokens + start : num_tokens + start + length] if num_types else None
        yield TokenizedText(values[start : start + length], types, num_prompt)
        start += length


def encode_costs(costs: Costs) -> list[list[float]]:
    return [[variant.batch, variant.rows, variant.texts, seconds] for variant, seconds in costs.items()]


def decode_costs(rows: Sequence[Sequence[float]]) -> dict[EncoderVariant, float]:
    return {EncoderVariant(int(b), int(r), int(t)): float(seconds) for b, r, t, seconds in rows}
