"""Describes, estimates, tries and verifies decoders: teacher-forced logits and greedy tokens are compared, in f32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.config import StaticLLMConfig
from staticllm.core import ModelShape, OnProgress, ProgramMode, Variant
from staticllm.devices import check_device, get_core, known_properties
from staticllm.errors import PromptTooLongError
from staticllm.properties import resolve

from ...compiler_passes.compiling.compile import CompilePlan, compile_all
from ...kvcache.step import Segment, buffer_bytes
from ..embedding.encoder_files import read_encoder_files
from ..llm_pipeline import StaticLLMPipeline
from ..loading.decoder_kind import DecoderJob, DecoderKind, DecoderPlan, job_of
from ..loading.kind import ProgramKind
from ..loading.load import load_job
from ..programs.model_runner import ModelRunner
from ..programs.variant_index import VariantIndex
from ..programs.warm_up import make_runner
from .diagnosis import Diagnosis, Trial, copies_of_weights, needs
from .encoder_diagnosis import try_reranker
from .measured_memory import measure_memory
from .npu_programs import CompiledForReport, predicted_times
from .npu_reports import PredictedTimes
from .process_memory import MeasuredMemory
from .reference import StatefulReference, exact_for
from .reports import (
    Agreement,
    DecoderEstimate,
    DecoderReport,
    KVReport,
    LayerReport,
    MemoryEstimate,
    ProgramsEstimate,
    RecurrentReport,
    RecurrentStateReport,
    StateReport,
    TimedVariant,
    VariantEstimate,
    VariantReport,
    Verdict,
    difference,
)
from .settings import planned_settings

STEPS, NUM_NEW, GREEDY_PROMPTS = 96, 48, (5, 40, 300)
KV_LENS = (48, 64)
"""KV lengths; a generation after a prompt of 40 tokens exceeds the smaller ones."""
CHUNKS = (16, 64)
TOLERANCE = 1e-3
"""Largest difference of logits, as a share of the range of the reference's logits."""
INTERLEAVED_STEPS = 16
NUM_DRAFTED = 4
LEAD = 32
"""Random tokens at the beginning of a text."""
LEAST_AGREEMENT, MOST_DISTANCE = 0.9, 0.1
"""Limits beyond which a set fails verification. In bf16 with 8-bit activations the embedded model agrees in 95 of 97 places."""
ORDINARY = (8, 1000)
"""Token ids of every vocabulary that is not a toy."""
SMALL = {"MAX_PROMPT_LEN": 64, "MIN_RESPONSE_LEN": 64, "MAX_NUM_SEQS": 1, "MEASURE_COSTS": False}
"""Properties of a decoder that is only tried: few programs and little memory."""


@dataclass(frozen=True)
class DecoderDiagnosis(Diagnosis[ProgramKind[Variant, ModelShape, ModelRunner]]):
    """The questions about decoders."""

    kind: type[ProgramKind[Variant, ModelShape, ModelRunner]] = DecoderKind
    chunks: tuple[int, ...] = CHUNKS
    """The rows of the prefill programs that are verified."""
    takes_adapters = True

    def job(
        self,
        directory: Path,
        device: str,
        properties: Mapping[str, Any],
        on_progress: OnProgress = lambda event: None,
        check: Callable[[ov.Core, object], str] = check_device,
    ) -> DecoderJob:
        name = check(get_core(), device)
        resolved = resolve(properties, known_properties(get_core(), name))
        return job_of(directory, name, resolved.config, on_progress, resolved.explicit, check)

    def report(self, job: DecoderJob) -> DecoderReport:
        return self.report_of(job, job.kind.plan(job))

    def report_of(self, job: DecoderJob, plan: CompilePlan[Variant, ModelShape]) -> DecoderReport:
        assert isinstance(plan, DecoderPlan), "it is a decoder's"
        shape = plan.lowered.shape
        mode = plan.options.mode
        variants = tuple(VariantReport(v.phase, v.rows, v.kv_len, v.sequences) for v in plan.variants)
        return DecoderReport(
            **{**self.described(job, plan), "variants": variants},
            settings=planned_settings(get_core(), plan.options),
            vocab_size=shape.vocab_size,
            num_states=len(shape.kv_states),
            states=tuple(StateReport(s.past_name, s.variable_id, s.heads, s.head_dim) for s in shape.kv_states),
            recurrent=_recurrent(shape),
            is_packable=shape.is_packable,
            rope_limits=shape.rope_limits,
            layers=_layers(plan),
            masks=tuple(kind.label for kind in shape.masks),
            kv=_kv(plan, job.config),
            max_num_seqs=job.config.num_seqs(mode),
        )

    def buffer_bytes(self, plan: CompilePlan[Variant, ModelShape]) -> int:
        return buffer_bytes(plan.variants, plan.lowered.shape)

    def estimate(self, job: DecoderJob) -> DecoderEstimate:
        report = self.report(job)
        num_masks = len(report.masks)
        variants = (
            VariantEstimate(**asdict(v), mask_bytes=4 * v.rows * (v.kv_len + v.rows) * num_masks)
            for v in report.variants
        )
        programs = ProgramsEstimate(report.programs, report.num_programs, copies_of_weights(report))
        return DecoderEstimate(**needs(report, self.bytes_of(report)), programs=programs, variants=tuple(variants))

    def bytes_of(self, report: DecoderReport) -> dict[str, int]:
        return {
            "weights": report.weights_bytes * copies_of_weights(report),
            "KV slots": report.kv.bytes,
            "host pool, at most": report.kv.host_bytes,
            "recurrent states": report.recurrent.bytes_a_sequence * 2,
            "buffers": report.buffers_bytes,
        }

    def predicted(self, job: DecoderJob, found: CompiledForReport, is_repriced: bool) -> PredictedTimes:
        index = VariantIndex(found.plan.variants, found.plan.lowered.shape.needs_real_rows)
        return predicted_times(index, found.seconds(is_repriced), found.roof, job.config.max_prompt_len)

    def measure(self, job: DecoderJob) -> MemoryEstimate | MeasuredMemory:
        """Load a model in a process of its own, and divide its private memory among the parts of a pipeline.

        One that sees windows is loaded here, because that process has the pipeline of text.
        """
        if job.config.cross_windows is not None:
            return super().measure(job)
        return measure_memory(job.directory, job.device, job.config)

    def timed(self, variant: Variant, seconds: float | None) -> TimedVariant:
        return TimedVariant(variant, str(variant), variant.rows, seconds)

    def verdicts(self, job: DecoderJob, modes: Sequence[ProgramMode]) -> Iterator[Verdict]:
        """Compare every mode and size of chunks. On other devices than the CPU tokens may differ in near-ties."""
        # what cannot be lowered is refused before the original runs
        plan = job.kind.plan(_exact(job, modes[0], self.chunks[0], job.config.max_seq_len))
        assert isinstance(plan, DecoderPlan), "it is a decoder's"
        limits = plan.lowered.shape.rope_limits
        lengths = (
            *GREEDY_PROMPTS,
            *(max(1, limit - NUM_NEW // 2) for limit in limits),
        )  # the answers to these cross a limit
        reference = StatefulReference(job.directory, rope_limits=limits)
        prompts = {length: _tokens(length) for length in lengths}
        text = _tokens(STEPS)
        expected = reference.logits(text)
        answers = {length: reference.greedy(prompt, NUM_NEW) for length, prompt in prompts.items()}
        for mode, chunk in product(modes, self.chunks):
            name = f"{mode}, chunks of {chunk}"
            runner = _runner(_exact(job, mode, chunk, max(lengths)))
            yield _logits(f"{name}: logits", runner, text, expected)
            if len(runner.index.widest) and runner.index.max_decoding(0) > 1:
                yield _interleaved(f"{name}: interleaved", runner, text, expected)
            if not runner.cache.states and runner.cache.left_of_factors(STEPS // 3) >= NUM_DRAFTED:
                yield _drafted(f"{name}: draft", runner, text, expected)
            for length, prompt in prompts.items():
                yield _greedy(f"{name}: {length} tokens", runner, prompt, answers[length])

    def agreement(self, job: DecoderJob) -> Agreement:
        """Load a model, and compare it with the original in f32, in whatever precision it computes.

        Both run the same text token by token: random tokens, and the original's continuation. After a near-tie both continue
        with the same token, so that it counts as one place.
        """
        runner = load_job(job).runner
        reference = StatefulReference(job.directory, rope_limits=runner.cache.rope_limits)
        prompt = _tokens(LEAD)
        text = prompt + reference.greedy(prompt, STEPS)
        reference.reset()
        expected = reference.logits(text)[LEAD - 1 :]
        sequence = runner.reset()
        found = [runner.prefill(sequence, prompt).copy()]
        found += [runner.decode(sequence, token).copy() for token in text[LEAD:]]
        same = [int(mine.argmax()) == int(other.argmax()) for mine, other in zip(found, expected, strict=True)]
        share = float(np.mean(same))
        distance = float(np.abs(np.stack(found) - expected).max() / np.ptp(expected))
        is_ok = share >= LEAST_AGREEMENT and distance <= MOST_DISTANCE
        return Agreement(is_ok, share, distance, places=len(found), against="CPU, f32")

    def agreement_text(self, found: Mapping[str, Any]) -> str:
        distance = f"logits differ by {found['distance']:.1e} of their range"
        return f"{found['agreement']:.1%} of {found['places']} tokens agree, {distance}"

    def try_out(self, job: DecoderJob) -> Trial:
        """Run a chat turn, or one token without a template; a causal language model that scores texts runs as a reranker."""
        if read_encoder_files(job.directory).score_tokens:
            return try_reranker(job, is_cross_encoder=False)
        with StaticLLMPipeline(job.directory, job.device, config=SMALL, on_progress=job.on_progress) as pipe:
            return Trial(_said_to(pipe))


def _said_to(pipe: StaticLLMPipeline) -> str:
    """Run one turn through the chat template if there is one, else one token of text, and return how it was run."""
    pipe.set_generation_config(pipe.get_generation_config())  # which checks what the model's own file says
    if not pipe.get_tokenizer().chat_template:
        pipe.generate("a", max_new_tokens=1, apply_chat_template=False)
        return ", without a chat template"
    try:
        pipe.generate("a", max_new_tokens=1)
    except PromptTooLongError:  # the template works, and its text is longer than what is loaded for a trial
        pipe.generate("a", max_new_tokens=1, apply_chat_template=False)
    return " with its chat template"


def _kv(plan: DecoderPlan, config: StaticLLMConfig) -> KVReport:
    num_slots = config.num_kv_slots(plan.options.mode)
    slot_bytes = plan.lowered.shape.slot_bytes
    return KVReport(plan.kv_type, num_slots, slot_bytes, slot_bytes * num_slots, slot_bytes * config.num_host_slots)


def _recurrent(shape: ModelShape) -> RecurrentReport:
    states = shape.recurrent_states
    reports = tuple(RecurrentStateReport(s.past_name, s.variable_id, tuple(s.shape), s.dtype) for s in states)
    return RecurrentReport(len(states), sum(state.num_bytes for state in states), reports)


def _layers(plan: DecoderPlan) -> tuple[LayerReport, ...]:
    graph = plan.lowered.graph
    keys = [state for state in graph.kv_states if state.role == "key" and not state.is_scale]
    return tuple(
        LayerReport(key.layer, query_heads, key.heads, key.head_dim, mask)
        for key, query_heads, mask in zip(keys, graph.query_heads, graph.layer_masks, strict=True)
    )


def _exact(job: DecoderJob, mode: ProgramMode, chunk: int, longest: int) -> DecoderJob:
    """Return the job for prompts of up to ``longest`` tokens, programs of this mode, chunks of this size; in f32 on a CPU."""
    kv_len = longest + 2 * NUM_NEW
    exact = exact_for(job.device)
    config = StaticLLMConfig(
        programs=mode,
        max_prompt_len=longest,
        min_response_len=kv_len - longest,
        max_num_seqs=2,
        kv_slots=2 * kv_len,
        prefill_rows=(chunk,),
        generate_kv_lens=(*KV_LENS, kv_len),
        kv_cache_precision="f32" if exact else None,
        device_properties=exact,
    )
    return replace(job, config=config)


def _runner(job: DecoderJob) -> ModelRunner:
    """Compile the programs of a job, and one more that computes logits after every token of a draft."""
    plan = job.kind.plan(job)
    if not plan.lowered.shape.needs_real_rows:
        draft = Variant(2 * NUM_DRAFTED, plan.variants[-1].kv_len, extra_logits=NUM_DRAFTED - 1)
        plan = replace(plan, variants=(*plan.variants, draft))
    return make_runner(compile_all(plan, job.on_progress), job.on_progress)


def _tokens(count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(count).integers(*ORDINARY, count).tolist()
    return tokens


def _logits(check: str, runner: ModelRunner, text: list[int], expected: NDArray[np.float32]) -> Verdict:
    """Compare logits: a third of the text runs as a prompt, then one token of the text per step."""
    sequence = runner.reset()
    start = len(text) // 3
    found = [runner.prefill(sequence, text[:start]).copy()]
    found += [runner.decode(sequence, token).copy() for token in text[start:]]
    differences = np.abs(np.stack(found) - expected[start - 1 :])
    share = float(differences.max() / np.ptp(expected))
    return difference(check, share, TOLERANCE, "logits")


def _interleaved(check: str, runner: ModelRunner, text: list[int], expected: NDArray[np.float32]) -> Verdict:
    """Interleave with a second sequence, in mixed prefill where a variant allows it and in decoding."""
    runner.reset()
    mine = runner.cache.open()
    other = runner.cache.open()
    start = len(text) // 3
    found = dict[int, NDArray[np.float32]]()
    runner.prefill(mine, text[:8])
    runner.prefill(other, text[::-1][:start])
    chunk = [Segment(mine, np.array(text[8:12])), Segment(other, np.array([text[0]]))]
    if runner.variant_for(chunk) is not None:
        found[11] = runner.step(chunk)[0].copy()
    found[start - 1] = runner.prefill(mine, text[len(mine) : start]).copy()
    for place in range(start, start + INTERLEAVED_STEPS):
        tokens = [Segment(mine, np.array([text[place]])), Segment(other, np.array([text[-place]]))]
        found[place] = runner.step(tokens)[0].copy()
    share = float(max(np.abs(logits - expected[place]).max() for place, logits in found.items()) / np.ptp(expected))
    return difference(check, share, TOLERANCE, "logits")


def _drafted(check: str, runner: ModelRunner, text: list[int], expected: NDArray[np.float32]) -> Verdict:
    """Compare logits after each token of a draft whose first half is accepted, and after the rejected half is discarded."""
    sequence = runner.reset()
    start = len(text) // 3
    half = NUM_DRAFTED // 2
    runner.prefill(sequence, text[:start])
    draft = Segment(sequence, np.array(text[start : start + half] + text[:half]), num_logits=NUM_DRAFTED)
    variant = runner.variant_for([draft])
    assert variant is not None
    (result,) = runner.run(variant, [draft], accept=lambda segment, logits: half).segments
    found = [*result.logits[:half].copy()]
    found += [runner.decode(sequence, token).copy() for token in text[start + half : start + 2 * half]]
    share = float(np.abs(np.stack(found) - expected[start : start + 2 * half]).max() / np.ptp(expected))
    return difference(check, share, TOLERANCE, "logits")


def _greedy(check: str, runner: ModelRunner, prompt: list[int], expected: list[int]) -> Verdict:
    sequence = runner.reset()
    found = list[int]()
    logits = runner.prefill(sequence, prompt)
    while len(found) < len(expected):
        found.append(int(logits.argmax()))
        logits = runner.decode(sequence, found[-1])
    same = next(
        (i for i, (mine, other) in enumerate(zip(found, expected, strict=True)) if mine != other), len(expected)
    )
    detail = "" if same == len(expected) else f"token {same} is {found[same]}, in the original {expected[same]}"
    share = same / len(expected)
    return Verdict(check, share == 1, share, detail, f"{share:.0%} of the tokens are the same")
