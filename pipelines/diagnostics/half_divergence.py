"""Measures how far a decoder's probabilities in f16 diverge from those of the original in f32: ``verify --precision f16``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from staticllm.core import Variant
from staticllm.devices import check_device, get_core, is_present, kind
from staticllm.errors import ConfigError, NumericalError

from ...compiler_passes.artifacts.fingerprint import with_article
from ...compiler_passes.compiling.compile import compile_all
from ..loading.decoder_kind import DecoderJob, DecoderPlan
from ..loading.kind import LoadJob
from ..programs.model_runner import ModelRunner
from ..programs.warm_up import make_runner
from .divergence import Logits, compare, reference_texts
from .half_precision import Extremes, RoundedModel
from .reference import exact_for
from .reports import Divergence

EMULATED = "emulated: no {device} here computes f16"
WHOLE_NORMS, NORMS_IN_STEPS = "f16", "f16, norms in steps"


@dataclass(frozen=True)
class HalfDivergence:
    """The divergence of programs in f16."""

    divergence: Divergence
    how: str
    """Where they ran."""
    not_finite: int
    """The number of tokens after which a logit was infinite or no number; the divergence is of the others."""
    extremes: Extremes | None
    """What was computed, if it was emulated."""
    decides: bool = True
    """Whether the model fails if they diverge; else they only inform."""

    @property
    def is_good(self) -> bool:
        """Whether all logits are numbers, and their divergence is as small as that of a setting that may be chosen."""
        return self.divergence.is_within and not self.not_finite

    @property
    def is_ok(self) -> bool:
        """Whether the programs are good, or need not be."""
        return self.is_good or not self.decides

    def line(self) -> str:
        found = self.divergence
        mark = "ok" if self.is_good else "FAIL" if self.decides else "note"
        text = f"KL {found.mean:.1e} ± {found.error:.0e} nats per token, at most {found.largest:.1e}"
        text = f"{mark:<4} {found.settings}: {text}; {found.agreement:.1%} of {found.tokens} tokens agree"
        if self.not_finite:
            text += f"; {self.not_finite} tokens without finite logits"
        seen = self.extremes
        if seen is not None:
            text += f"; largest number {seen.largest:.0f} ({seen.where})"
            text += f", {seen.overflows} numbers beyond f16, the first in {seen.first}" if seen.overflows else ""
        return f"{text} ({self.how})"

    def as_dict(self) -> dict[str, Any]:
        found = self.divergence
        seen = self.extremes
        return {
            "check": found.settings,
            "ok": self.is_ok,
            "how": self.how,
            "mean": found.mean,
            "error": found.error,
            "largest": found.largest,
            "agreement": found.agreement,
            "tokens": found.tokens,
            "not_finite": self.not_finite,
            **({} if seen is None else {"extremes": asdict(seen)}),
        }


def measure_f16(job: LoadJob[Any]) -> Iterator[HalfDivergence]:
    """Yield the divergence of a decoder's programs in f16 on the job's device, or on the CPU with the passes of that device.

    An emulated program computes norms as one operation, as NPUs do, and decides; a second one rounds each of their steps, and
    only informs.

    Raises:
        ConfigError: the model is no decoder.
        StaticLLMError: what lowering or running it raises.
    """
    if job.kind.name != "decoder":
        raise ConfigError(
            f"--precision f16 compares the next tokens of a decoder, this model is {with_article(job.kind.name)}: leave it out"
        )
    decoder: DecoderJob = job
    if kind(decoder.device) == "CPU":  # programs over pages have no slots of f16
        decoder = replace(decoder, config=replace(decoder.config, programs="shared"))
    plan = decoder.kind.plan(decoder)
    assert isinstance(plan, DecoderPlan), "it is the plan of a decoder"
    texts, expected = reference_texts(decoder.directory)
    device = decoder.device
    if has_f16(device):
        runner = _compiled(plan, device, {"INFERENCE_PRECISION_HINT": "f16"} if kind(device) != "NPU" else {})
        yield _compared(WHOLE_NORMS, expected, _logits(runner, texts, expected), f"on {device}", None)
        return
    for name, has_whole_norms in ((WHOLE_NORMS, True), (NORMS_IN_STEPS, False)):
        rounded = RoundedModel.of(plan.lowered, has_whole_norms)
        runner = _compiled(replace(plan, lowered=rounded), "CPU", exact_for("CPU"))
        rounded.extremes.reset()  # the warm-up runs tokens that mean nothing
        found = _logits(runner, texts, expected)
        compared = _compared(name, expected, found, EMULATED.format(device=device), rounded.extremes)
        yield replace(compared, decides=has_whole_norms)


def has_f16(device: str) -> bool:
    """Return whether a device is on this machine and computes in f16."""
    core = get_core()
    if not is_present(core, device):
        return False
    return "FP16" in core.get_property(check_device(core, device), "OPTIMIZATION_CAPABILITIES")


def _logits(runner: ModelRunner, texts: list[list[int]], expected: list[Logits]) -> list[Logits]:
    """Return the logits after each token of texts, as ``expected`` has them; no numbers from where some are not finite."""
    found = [np.full_like(logits, np.nan) for logits in expected]
    for text, logits in zip(texts, found, strict=True):
        sequence = runner.reset()
        for place, token in enumerate(text):
            try:
                logits[place] = runner.decode(sequence, token)
            except NumericalError:
                break
    return found


def _compared(
    name: str, expected: list[Logits], found: list[Logits], how: str, extremes: Extremes | None
) -> HalfDivergence:
    """Compare the logits of the tokens after which all are finite."""
    finite = [np.isfinite(logits).all(-1) for logits in found]
    num_bad = int(sum((~each).sum() for each in finite))
    kept = [each if each.any() else np.ones_like(each) for each in finite]
    pairs = zip(expected, found, kept, strict=True)
    cleaned = [(mine[each], np.nan_to_num(other[each])) for mine, other, each in pairs]
    return HalfDivergence(compare(name, [a for a, _ in cleaned], [b for _, b in cleaned]), how, num_bad, extremes)


def _compiled(plan: DecoderPlan, device: str, properties: Mapping[str, Any]) -> ModelRunner:
    """Compile the model for calls of one row."""
    kv_len = max(variant.kv_len for variant in plan.variants if variant.rows == 1)
    options = replace(
        plan.options, device=device, layout="separate", properties={"prefill": properties, "generate": properties}
    )
    return make_runner(compile_all(replace(plan, options=options, variants=(Variant(1, kv_len),))))
