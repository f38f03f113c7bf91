"""What inspect, plan, verify, compile and doctor ask of a kind of model. Every answer has a default, which suits any kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.core import OnProgress, ProgramMode, ProgramVariant, ProgressEvent
from staticllm.devices import check_device, get_core, is_present, kind, known_properties
from staticllm.errors import ModelError, last_line
from staticllm.properties import resolve

from ...compiler_passes.artifacts.cache import BlobCache, key_of
from ...compiler_passes.artifacts.fingerprint import with_article
from ...compiler_passes.artifacts.measurements import CostsPlace
from ...compiler_passes.compiling.compile import CompiledPrograms, CompilePlan, compile_all, first_variants
from ...compiler_passes.compiling.dry_run import run_apart
from ...compiler_passes.compiling.layout import PROGRAM_BYTES
from ...compiler_passes.model_kind import kind_in
from ..loading.kind import LoadJob, ProgramKind
from ..loading.load import load_job
from .npu_programs import CompiledForReport, compile_for_report, unknown_of
from .npu_reports import NPUEstimate, NPUReport, PredictedTimes
from .process_memory import MeasuredMemory, device_memory, private_bytes
from .reference import EXACT, exact_for
from .reports import (
    Agreement,
    MemoryEstimate,
    ModelReport,
    SecondsBasis,
    TimedEstimate,
    TimedVariant,
    Verdict,
    difference,
)
from .settings import planned_settings

TOLERANCE, OTHER_TOLERANCE = 1e-3, 1e-2
"""Largest difference as a share of the range of the original's numbers: on a CPU in f32, and elsewhere."""
LEAST_COSINE, MOST_DISTANCE = 0.99, 0.1
"""Limits beyond which a set fails verification."""


@dataclass(frozen=True)
class Trial:
    """How a model was tried (a continuation of "loaded and run on CPU"), and what should be done although it ran."""

    how: str = ""
    remedy: str = ""


K = TypeVar("K", bound=ProgramKind[Any, Any, Any])


class Jobs(dict[str, LoadJob[Any]]):
    """The jobs of a model by the names of the folders that their blobs have within that of the model; of one graph "".

    ``diagnosis``: the questions about the whole model.
    """

    def __init__(self, diagnosis: Diagnosis[Any], jobs: Mapping[str, LoadJob[Any]]) -> None:
        super().__init__(jobs)
        self.diagnosis = diagnosis


@dataclass(frozen=True)
class Diagnosis(Generic[K]):
    """The questions about one kind of model. A job names the model, the device and the choices.

    All methods raise what lowering, loading or running the model does: ``ModelError``, ``UnsupportedModelError``,
    ``DeviceError`` or ``ConfigError``.
    """

    kind: type[K]
    """The class of its ``ProgramKind``; None for a model in parts, which answers for the whole only."""

    takes_adapters: ClassVar[bool] = False
    needs_tokenizer: ClassVar[bool] = True
    places: ClassVar[str] = "calls"
    """What ``agreement`` counts."""

    def job(
        self,
        directory: Path,
        device: str,
        properties: Mapping[str, Any],
        on_progress: OnProgress = lambda event: None,
        check: Callable[[ov.Core, object], str] = check_device,
    ) -> LoadJob[Any]:
        """Return the job for a directory. ``check`` refuses devices by a ``DeviceError``.

        Args:
            properties: The user's, with GenAI's names.
        """
        name = check(get_core(), device)
        resolved = resolve(properties, known_properties(get_core(), name))
        return LoadJob(self.kind(), directory, name, resolved.config, on_progress, resolved.explicit)

    def jobs(
        self,
        directory: Path,
        device: str,
        properties: Mapping[str, Any],
        on_progress: OnProgress = lambda event: None,
        check: Callable[[ov.Core, object], str] = check_device,
    ) -> Jobs:
        """Return the jobs for a directory, one for each part of the model; the arguments are those of ``job``."""
        return Jobs(self, {"": self.job(directory, device, properties, on_progress, check)})

    def what(self, directory: Path) -> str:
        """Return what the model in a checked directory is, with an article."""
        found = kind_in(directory)
        return with_article(self.kind.name) if found is None else found.what

    def report(self, job: LoadJob[K]) -> ModelReport:
        """Lower a model and describe its passes, variants and bytes. Nothing is compiled."""
        return self.report_of(job, job.kind.plan(job))

    def report_of(self, job: LoadJob[K], plan: CompilePlan[Any, Any]) -> ModelReport:
        return ModelReport(**self.described(job, plan), settings=planned_settings(get_core(), plan.options))

    def described(self, job: LoadJob[K], plan: CompilePlan[Any, Any]) -> dict[str, Any]:
        """Return the fields of a report that are those of every kind, but ``settings``."""
        return {
            "model": str(job.directory),
            "kind": job.kind.name,
            "device": job.device,
            "programs": plan.options.layout,
            "num_programs": len(first_variants(plan.variants, plan.options)),
            "weights_bytes": job.weights.stat().st_size,
            "buffers_bytes": self.buffer_bytes(plan),
            "passes": tuple(plan.lowered.reports),
            "variants": plan.variants,
        }

    def buffer_bytes(self, plan: CompilePlan[Any, Any]) -> int:
        """Return the bytes of the host's memory behind the ports of all variants."""
        models = map(plan.lowered.specialise, plan.variants)
        ports = [port for model in models for port in (*model.inputs, *model.outputs)]
        return sum(port.get_element_type().size * math.prod(port.get_shape()) for port in ports)

    def estimate(self, job: LoadJob[K]) -> MemoryEstimate:
        """Estimate the bytes of weights, programs and buffers, and whether they fit into the device. Nothing is compiled.

        The seconds per call are those that a cache keeps of an earlier start, if the job has a cache.
        """
        report = self.report(job)
        known = _kept_seconds(job)
        parts = {**self.bytes_of(report), "programs": PROGRAM_BYTES * report.num_programs}
        return self._timed(report, parts, known, "kept in the cache" if known else "unknown")

    def bytes_of(self, report: Any) -> dict[str, int]:
        """Return the bytes of a model by part, without its programs."""
        return {"weights": report.weights_bytes * copies_of_weights(report), "buffers": report.buffers_bytes}

    def report_on_npu(self, job: LoadJob[K]) -> NPUReport:
        """Compile a model for the target of its job, and describe its programs by the compiler's schedules.

        Raises:
            StaticLLMError: as for ``compile_for_report``.
        """
        found = compile_for_report(job)
        return NPUReport(self.report_of(job, found.plan), found.described())

    def estimate_on_npu(self, job: LoadJob[K]) -> NPUEstimate:
        """Compile a model for the target of its job, and predict its times by the compiler's schedules, and its memory.

        Raises:
            StaticLLMError: as for ``compile_for_report``.
        """
        found = compile_for_report(job)
        report = self.report_of(job, found.plan)
        compiled = found.described()
        parts = {
            **self.bytes_of(report),
            "weights": found.weights_bytes,
            "buffers": report.buffers_bytes + found.wires_bytes,
            "blobs": compiled.blob_bytes,
        }
        num_calls = compiled.programs[0].num_calls
        return NPUEstimate(
            **needs(report, parts),
            compiled=compiled,
            device_calls=num_calls,
            times=self.predicted(job, found, is_repriced=False),
            repriced=self.predicted(job, found, is_repriced=True) if compiled.is_repriced else None,
            unknown=unknown_of(found.platform, num_calls, compiled.is_repriced),
        )

    def predicted(self, job: LoadJob[K], found: CompiledForReport, is_repriced: bool) -> PredictedTimes | None:
        """Return the predicted times of a decoder; None for other kinds.

        Args:
            is_repriced: Whether 4-bit reads are priced by their bytes.
        """
        del job, found, is_repriced
        return None

    def measure(self, job: LoadJob[K]) -> MemoryEstimate | MeasuredMemory:
        """Load a model in this process, run each of its programs, and measure the private memory and the seconds per call."""
        report = self.report(job)
        before = private_bytes()
        loaded = before

        def note(event: ProgressEvent) -> None:
            nonlocal loaded
            if event.is_done and event.stage in ("compile", "import"):
                loaded = private_bytes()
            job.on_progress(event)

        runner = load_job(replace(job, on_progress=note)).runner
        after = private_bytes()
        parts = {"programs, with weights": loaded - before, "buffers, first calls": after - loaded}
        return self._timed(report, parts, runner.costs.measured, "measured now")

    def timed(self, variant: Any, seconds: float | None) -> TimedVariant:
        """Return a variant with the seconds of a call; None if they are not known."""
        return TimedVariant(variant, str(variant), None, seconds)

    def _timed(
        self, report: ModelReport, parts: Mapping[str, int], seconds: Mapping[Any, float], basis: SecondsBasis
    ) -> TimedEstimate:
        variants = (self.timed(each, seconds.get(each)) for each in report.variants)
        return TimedEstimate(
            **needs(report, parts),
            programs=report.programs,
            num_programs=report.num_programs,
            seconds_source=basis,
            variants=tuple(variants),
        )

    def verdicts(self, job: LoadJob[K], modes: Sequence[ProgramMode]) -> Iterator[Verdict]:
        """Compare programs of each mode with the original in f32, and yield each verdict."""
        tolerance = TOLERANCE if kind(job.device) == "CPU" else OTHER_TOLERANCE
        for mode in modes:
            exact = in_mode(job, mode)
            for variant, found, expected in self._compared(exact, compile_all(exact.kind.plan(exact), job.on_progress)):
                share = float(np.abs(found - expected).max() / np.ptp(expected))
                yield difference(f"{mode}: {variant}", share, tolerance)

    def verdicts_of(self, jobs: Jobs, modes: Sequence[ProgramMode]) -> Iterator[Verdict]:
        """Compare the programs of all parts of a model with the original, and yield each verdict."""
        for job in jobs.values():
            yield from self.verdicts(job, modes)

    def agreement(self, job: LoadJob[K]) -> Agreement:
        """Load a model, for example from its blob set, and compare it with the original in f32."""
        pairs = list(self._compared(job, load_job(job).programs))
        cosine = min(least_cosine(found[None], expected[None]) for _, found, expected in pairs)
        distance = max(float(np.abs(found - expected).max() / np.ptp(expected)) for _, found, expected in pairs)
        return agreed(cosine, distance, len(pairs))

    def agreement_text(self, found: Mapping[str, Any]) -> str:
        """Return in words what ``agreement`` found, which a manifest stores."""
        distance = f"numbers differ by {found['distance']:.1e} of their range"
        return f"{found['places']} {self.places}, cosine {found['agreement']:.6f}, {distance}"

    def try_out(self, job: LoadJob[K]) -> Trial:
        load_job(job)
        return Trial()

    def try_model(self, directory: Path, device: str, on_progress: OnProgress) -> Trial:
        """Load all parts of the model in a directory and run them once."""
        return self.try_out(self.job(directory, device, {}, on_progress))

    def original(self, job: LoadJob[K]) -> Callable[[Mapping[str, NDArray[Any]]], Mapping[str, NDArray[Any]]]:
        """Return the original, from inputs by port name to outputs: the exported graph, whose ports have the programs' names.

        Raises:
            ModelError: the CPU cannot compile it.
        """
        model = job.read_model()
        try:
            compiled = get_core().compile_model(model, "CPU", dict(EXACT))
        except RuntimeError as error:
            raise ModelError(f"the CPU cannot compile the original: {last_line(error)}") from error
        return lambda feeds: run_apart(compiled, feeds)

    def _compared(
        self, job: LoadJob[K], programs: CompiledPrograms[Any, Any]
    ) -> Iterator[tuple[ProgramVariant, NDArray[Any], NDArray[Any]]]:
        """Yield each variant with the outputs of a random call of its program and of the original, as vectors."""
        original = self.original(job)
        for variant, compiled in programs.compiled.items():
            call = job.kind.random_call(programs, variant)
            expected = original(call)
            found = run_apart(compiled, call)
            names = sorted(expected.keys() & found.keys())
            if not names:
                raise ModelError("the programs and the original have no output of the same name")
            values = [np.concatenate([each[name].ravel() for name in names]) for each in (found, expected)]
            yield variant, values[0], values[1]


def copies_of_weights(report: ModelReport) -> int:
    """Return how often the weights are in memory: the CPU packs them for each program."""
    return report.num_programs if kind(report.device) == "CPU" and report.programs != "blocks" else 1


def needs(report: ModelReport, parts: Mapping[str, int]) -> dict[str, Any]:
    """Return the fields of every ``MemoryEstimate`` for these bytes by part."""
    needed = sum(parts.values())
    available = device_memory(get_core(), report.device)
    return {
        "model": report.model,
        "device": report.device,
        "is_present": is_present(get_core(), report.device),
        "bytes": dict(parts),
        "needed": needed,
        "available": available,
        "fits": None if available is None else needed <= available,
    }


def in_mode(job: LoadJob[Any], mode: ProgramMode) -> LoadJob[Any]:
    """Return the job with programs of this mode, which compute in f32 on a CPU."""
    return replace(job, config=replace(job.config, programs=mode, device_properties=exact_for(job.device)))


def agreed(cosine: float, distance: float, places: int) -> Agreement:
    """Return the agreement of vectors, in which ``agreement`` is the least cosine."""
    is_ok = cosine >= LEAST_COSINE and distance <= MOST_DISTANCE
    return Agreement(is_ok, cosine, distance, places, against="CPU, f32")


def least_cosine(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """Return the least cosine between the rows of two arrays ``[n, width]``."""
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    return float(np.min((found * expected).sum(axis=1) / np.maximum(norms, 1e-12)))


def _kept_seconds(job: LoadJob[Any]) -> Mapping[Any, float]:
    """Return the seconds per call that the job's cache keeps; none without a cache, or for a device that is not here."""
    folder = job.config.cache_dir
    if folder is None or not Path(folder).is_dir() or not is_present(get_core(), job.device):
        return {}
    fingerprint = job.kind.fingerprint(job)
    place = CostsPlace(BlobCache(folder).path(key_of(fingerprint)), fingerprint, job.key)
    return place.costs_of(job.kind.variant, job.kind.options(job)).read()
