"""Measures how far a model's probabilities diverge from those of the original in f32, for each setting of the CPU plugin.

A text that the original wrote runs token by token through the original, and through programs of each precision and quantization.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staticllm.config import StaticLLMConfig
from staticllm.core import Variant
from staticllm.devices import get_core, kind
from staticllm.errors import ConfigError
from staticllm.pipelines.diagnostics.reference import StatefulReference
from staticllm.pipelines.diagnostics.reports import Divergence
from staticllm.pipelines.diagnostics.settings import PRECISION, candidates, planned_settings
from staticllm.pipelines.loading.decoder_kind import DecoderPlan, prepare
from staticllm.pipelines.programs.compile import compile_all
from staticllm.pipelines.programs.model_runner import ModelRunner
from staticllm.pipelines.programs.warm_up import make_runner

MOST_DIVERGENCE = 2e-4
"""The largest mean divergence (KL, nats per token) of a setting that may be chosen without being asked for."""
TEXTS, TEXT_LEN = 8, 64
"""Number of texts, and their tokens: short ones, because means of texts differ up to 8 times (docs/lab/benchmarks.md)."""
PEERS: dict[str, dict[str, Any]] = {
    "the original, plugin's defaults (as GenAI)": {},
    "the original, f32 (as GenAI with f32)": {PRECISION: "f32"},
}

Logits = NDArray[np.float32]


def measure_divergence(
    models_path: str | os.PathLike[str],
    device: str,
    config: StaticLLMConfig,
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> Iterator[Divergence]:
    """Yield the divergence of every setting of this processor, those that the calibration chose among them, and of the original.

    The original with the plugin's defaults stores keys and values in 8 bits, as GenAI does. ``on_progress``: (settings measured,
    all settings). Raises ``ConfigError`` (the device is not a CPU; and what ``prepare`` raises).
    """
    if kind(device) != "CPU":
        raise ConfigError(f"device {device!r}: divergence is measured on the CPU only, use --device CPU")
    plan = prepare(models_path, device, config)
    texts, expected = reference_texts(Path(models_path))
    settings = candidates(get_core(), plan.options)
    chosen = planned_settings(get_core(), plan.options)
    total = len(settings) + len(PEERS)
    for number, (label, properties) in enumerate(settings.items()):
        on_progress(number, total)
        runner = _runner(plan, properties)
        found = [_teacher_forced(runner, text) for text in texts]
        yield compare(label, expected, found, tuple(part for part, name in chosen.items() if name == label))
    for number, (label, properties) in enumerate(PEERS.items(), len(settings)):
        on_progress(number, total)
        original = StatefulReference(models_path, properties)
        yield compare(label, expected, [_of_original(original, text) for text in texts])


def compare(label: str, expected: list[Logits], found: list[Logits], parts: tuple[str, ...] = ()) -> Divergence:
    """Compare logits ``[tokens, vocab]`` of several texts with those of the reference.

    ``parts``: the parts of the work for which the calibration chose this setting.
    """
    of_texts = [kl_divergence(mine, other) for mine, other in zip(expected, found, strict=True)]
    divergences = np.concatenate(of_texts)
    means = [each.mean() for each in of_texts]
    same = [mine.argmax(-1) == other.argmax(-1) for mine, other in zip(expected, found, strict=True)]
    mean = float(divergences.mean())
    return Divergence(
        settings=label,
        chosen_for=parts,
        mean=mean,
        error=float(np.std(means, ddof=1) / np.sqrt(len(means))) if len(means) > 1 else 0.0,
        largest=float(divergences.max()),
        agreement=float(np.concatenate(same).mean()),
        tokens=len(divergences),
        is_within=mean <= MOST_DIVERGENCE,
    )


def kl_divergence(expected: Logits, found: Logits) -> NDArray[np.float64]:
    """Return the Kullback-Leibler divergence of ``found`` from ``expected``, both ``[tokens, vocab]``, in nats per token."""
    true = _log_softmax(expected)
    other = _log_softmax(found)
    divergence: NDArray[np.float64] = (np.exp(true) * (true - other)).sum(-1)
    return divergence


def reference_texts(models_path: Path) -> tuple[list[list[int]], list[Logits]]:
    """Return texts that the original in f32 writes, sampled at temperature 1 with a fixed seed, and its logits after each token.

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


def _runner(plan: DecoderPlan, properties: Mapping[str, Any]) -> ModelRunner:
    """Compile the model for calls of one row with these properties."""
    variants = [Variant(1, variant.kv_len) for variant in plan.variants if variant.rows == 1 and variant.kv_len]
    single = plan.restricted(dict.fromkeys(variants))
    options = replace(plan.options, layout="shared", properties={"prefill": properties, "generate": properties})
    return make_runner(compile_all(replace(single, options=options)))


def _teacher_forced(runner: ModelRunner, text: list[int]) -> Logits:
    sequence = runner.reset()
    return np.stack([runner.decode(sequence, token).copy() for token in text])


def _of_original(original: StatefulReference, text: list[int]) -> Logits:
    """Run one token per call, so that later tokens see the keys and values as they are stored."""
    original.reset()
    return np.stack([original.logits([token])[-1] for token in text])
