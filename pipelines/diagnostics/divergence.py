"""Measures how far a model's probabilities diverge from those of the original in f32, for each setting of the CPU plugin.

A text runs through the original, and through programs of each precision and quantization. Without a text of the user, the
original writes texts, which run token by token.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import openvino_genai as genai
from numpy.typing import NDArray

from staticllm.config import StaticLLMConfig
from staticllm.core import Variant
from staticllm.devices import get_core, kind
from staticllm.errors import ConfigError, ModelError, last_line, quoted
from staticllm.model_files.model_at import check_model_dir

from ...compiler_passes.compiling.compile import compile_all
from ...kvcache.step import Segment
from ..loading.decoder_kind import DecoderPlan, prepare
from ..programs.model_runner import ModelRunner
from ..programs.warm_up import make_runner
from .reference import StatefulReference
from .reports import Divergence
from .settings import PRECISION, candidates, planned_settings

MOST_DIVERGENCE = 5e-3
"""The largest mean divergence (KL, nats per token) of a setting that may be chosen without being asked for.

It raises the perplexity of texts of the model's own kind by at most 0.5 % (docs/decisions.md)."""
TEXTS, TEXT_LEN = 8, 64
"""Number of texts, and their tokens: short ones, because means of texts differ up to 8 times (docs/lab/benchmarks.md)."""
PASSAGE_LEN, MOST_PASSAGES = 256, 32
"""Tokens of a passage of a given text, and the most passages."""
PASSAGE_ROWS = 16
"""Tokens per call of a passage: few, because the tokens of one call see each other's keys and values as they are computed."""
PEERS: dict[str, dict[str, Any]] = {
    "the original, plugin's defaults (as GenAI)": {},
    "the original, f32 (as GenAI with f32)": {PRECISION: "f32"},
}

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class TextDivergence:
    """What was found in one text or a part of it, per token."""

    divergences: NDArray[np.float64]
    """The divergence."""
    is_same: NDArray[np.bool_]
    """Whether the most likely next token is the same."""
    losses: NDArray[np.float64]
    """Negative logarithms of the probabilities of the text's next tokens, with the setting; one shorter at the end of a text."""
    exact_losses: NDArray[np.float64]
    """The same with the original."""

    @classmethod
    def of(cls, expected: Logits, found: Logits, following: list[int]) -> TextDivergence:
        """Compare logits ``[tokens, vocab]`` with those of the reference.

        Args:
            following: The next tokens.
        """
        true = _log_softmax(expected)
        other = _log_softmax(found)
        places = np.arange(len(following))
        return cls(
            _divergence(true, other),
            expected.argmax(-1) == found.argmax(-1),
            -other[places, following],
            -true[places, following],
        )

    @classmethod
    def joined(cls, parts: Iterable[TextDivergence]) -> TextDivergence:
        """Join the parts of a text, or texts."""
        each = [(part.divergences, part.is_same, part.losses, part.exact_losses) for part in parts]
        return cls(*map(np.concatenate, zip(*each, strict=True)))


def measure_divergence(
    models_path: str | os.PathLike[str],
    device: str,
    config: StaticLLMConfig,
    on_progress: Callable[[int, int], None] = lambda *_: None,
    text: str | None = None,
) -> Iterator[Divergence]:
    """Yield the divergence of every setting of this processor, those that the calibration chose among them, and of the original.

    The original with the plugin's defaults stores keys and values in 8 bits, as GenAI does. ``text`` is divided into passages of
    ``PASSAGE_LEN`` tokens; without it, the original writes texts.

    Args:
        on_progress: Gets the numbers of settings that are measured, and of all.

    Raises:
        ConfigError: the device is not a CPU; the text is shorter than a passage; and what ``prepare`` raises.
    """
    if kind(device) != "CPU":
        raise ConfigError(f"device {device!r}: divergence is measured on the CPU only, use --device CPU")
    if text is not None:
        config = replace(config, max_prompt_len=PASSAGE_LEN, min_response_len=PASSAGE_LEN, max_num_seqs=1)
    directory = check_model_dir(models_path)
    plan = prepare(directory, device, replace(config, programs="shared"))  # slots in pages have one type
    texts = reference_texts(directory)[0] if text is None else passages(directory, text)
    exact = StatefulReference(directory)
    rows = 1 if text is None or plan.lowered.shape.needs_real_rows else PASSAGE_ROWS
    settings = candidates(get_core(), plan.options)
    chosen = planned_settings(get_core(), plan.options)
    total = len(settings) + len(PEERS)
    for number, (label, properties) in enumerate(settings.items()):
        on_progress(number, total)
        program: _Program = _Ours(_runner(plan, properties, rows))
        parts = tuple(part for part, name in chosen.items() if name == label)
        yield summary(label, [_of_text(exact, program, tokens, rows) for tokens in texts], parts)
    for number, (label, properties) in enumerate(PEERS.items(), len(settings)):
        on_progress(number, total)
        program = StatefulReference(directory, properties)
        yield summary(label, [_of_text(exact, program, tokens, rows) for tokens in texts])


def compare(label: str, expected: list[Logits], found: list[Logits]) -> Divergence:
    """Compare logits ``[tokens, vocab]`` of several texts with those of the reference; nothing is known of their next tokens."""
    return summary(label, [TextDivergence.of(mine, other, []) for mine, other in zip(expected, found, strict=True)])


def summary(label: str, texts: list[TextDivergence], parts: tuple[str, ...] = ()) -> Divergence:
    """Return what was found in all texts.

    Args:
        parts: The parts of the work for which the calibration chose this setting.
    """
    joined = TextDivergence.joined(texts)
    means = [each.divergences.mean() for each in texts]
    mean = float(joined.divergences.mean())
    has_losses = len(joined.losses) > 0
    return Divergence(
        settings=label,
        chosen_for=parts,
        mean=mean,
        error=float(np.std(means, ddof=1) / np.sqrt(len(means))) if len(means) > 1 else 0.0,
        percentile_99=float(np.percentile(joined.divergences, 99)),
        largest=float(joined.divergences.max()),
        agreement=float(joined.is_same.mean()),
        tokens=len(joined.divergences),
        is_within=mean <= MOST_DIVERGENCE,
        perplexity=float(np.exp(joined.losses.mean())) if has_losses else None,
        exact_perplexity=float(np.exp(joined.exact_losses.mean())) if has_losses else None,
    )


def kl_divergence(expected: Logits, found: Logits) -> NDArray[np.float64]:
    """Return the Kullback-Leibler divergence of ``found`` from ``expected``, both ``[tokens, vocab]``, in nats per token."""
    return _divergence(_log_softmax(expected), _log_softmax(found))


def _divergence(true: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    divergence: NDArray[np.float64] = (np.exp(true) * (true - other)).sum(-1)
    return divergence


def reference_texts(models_path: Path) -> tuple[list[list[int]], list[Logits]]:
    """Return texts that the original in f32 writes, sampled at temperature 1 with a fixed seed, and its logits ``[n, vocab]``
    after each token.

    Such texts are typical of the model, which greedy texts are not: they tend to repeat themselves.
    """
    reference = StatefulReference(models_path)
    texts = list[list[int]]()
    logits = list[Logits]()
    for seed in range(TEXTS):
        random = np.random.default_rng(seed)
        text = [int(random.integers(1, 1000))]
        lines = list[Logits]()
        reference.reset()
        while len(lines) < TEXT_LEN:
            lines.append(reference.logits(text[-1:])[-1])
            text.append(_sampled(random, lines[-1]))
        texts.append(text[:TEXT_LEN])
        logits.append(np.stack(lines))
    return texts, logits


def _sampled(random: np.random.Generator, logits: Logits) -> int:
    shares = np.exp(_log_softmax(logits)).cumsum()
    return int(min(np.searchsorted(shares, random.random() * shares[-1]), len(shares) - 1))


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    exact = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    shifted: NDArray[np.float64] = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    return shifted


def passages(models_path: Path, text: str) -> list[list[int]]:
    """Divide the beginning of a text into at most ``MOST_PASSAGES`` passages of ``PASSAGE_LEN`` tokens.

    Each begins with the tokens that the tokenizer adds at the front, as every text that the model has seen.

    Raises:
        ConfigError: the text is too short.
        ModelError: the tokenizer cannot be read.
    """
    try:
        tokenizer = genai.Tokenizer(str(models_path))
        plain = tokenizer.encode(text, add_special_tokens=False).input_ids.data[0].tolist()
        front = tokenizer.encode("", add_special_tokens=True).input_ids.data.reshape(-1).tolist()
    except RuntimeError as error:
        raise ModelError(f"the tokenizer in {quoted(models_path)} cannot be used: {last_line(error)}") from error
    size = PASSAGE_LEN - len(front)
    if len(plain) < size:
        raise ConfigError(f"a text of {len(plain)} tokens is too short: at least {size} are needed")
    starts = range(0, min(len(plain) // size, MOST_PASSAGES) * size, size)
    return [[*front, *plain[start : start + size]] for start in starts]


class _Program(Protocol):
    """Whatever computes logits of one text after another."""

    def reset(self) -> None: ...

    def logits(self, tokens: list[int]) -> Logits: ...


class _Ours:
    """Runs tokens through programs of ours, and returns the logits after each of them."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._sequence = runner.reset()

    def reset(self) -> None:
        self._sequence = self._runner.reset()

    def logits(self, tokens: list[int]) -> Logits:
        """Return the logits ``[len(tokens), vocab]``."""
        if len(tokens) == 1:
            return self._runner.decode(self._sequence, tokens[0])[None].copy()
        segment = Segment(self._sequence, np.array(tokens), num_logits=len(tokens))
        variant = self._runner.variant_for([segment])
        assert variant is not None, "it was compiled for these rows"
        (result,) = self._runner.run(variant, [segment], accept=lambda segment, logits: len(tokens)).segments
        return result.logits.copy()


def _of_text(exact: _Program, program: _Program, text: list[int], rows: int) -> TextDivergence:
    """Run a text in calls of ``rows`` tokens, so that later ones see the keys and values as they are stored."""
    exact.reset()
    program.reset()
    found = list[TextDivergence]()
    for start in range(0, len(text), rows):
        tokens = text[start : start + rows]
        following = text[start + 1 : start + 1 + len(tokens)]
        found.append(TextDivergence.of(exact.logits(tokens), program.logits(tokens), following))
    return TextDivergence.joined(found)


def _runner(plan: DecoderPlan, properties: Mapping[str, Any], rows: int) -> ModelRunner:
    """Compile the model for calls of one or of ``rows`` tokens of a sequence, with logits after each."""
    kv_lens = dict.fromkeys(variant.kv_len for variant in plan.variants if variant.rows == 1 and variant.kv_len)
    variants = dict.fromkeys(
        Variant(count, kv_len, extra_logits=count - 1) for count in (1, rows) for kv_len in kv_lens
    )
    options = replace(plan.options, layout="shared", properties={"prefill": properties, "generate": properties})
    return make_runner(compile_all(replace(plan, options=options, variants=tuple(variants))))
