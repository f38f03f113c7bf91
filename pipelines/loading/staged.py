"""Compiles programs for this start: all at once, or the fewest that can serve first and the others in the background."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from staticllm.devices import kind
from staticllm.pipelines.artifacts.measurements import CostsPlace
from staticllm.pipelines.loading.kind import Job, LoadJob, R
from staticllm.pipelines.loading.loaded import DeferredPrograms, Loaded, ProgramStore, SecondProgram
from staticllm.pipelines.programs.build import CompiledPrograms, compile_all
from staticllm.pipelines.programs.compile_plan import CompilePlan
from staticllm.pipelines.programs.layout import program_mode
from staticllm.pipelines.programs.lowered import S, V


def load_compiled(job: Job[V, S, R], place: CostsPlace | None = None) -> Loaded[V, S, R]:
    """Compile the model; no blobs are written. ``place``: where the costs of its programs are kept, if anywhere.

    Raises:
        ModelError: a file of the model is missing or damaged.
        UnsupportedModelError: a pass cannot lower the model.
        DeviceError: the device is missing, or refused a program.
        ConfigError: an option is impossible for this model, or there is not enough memory for KV slots or masks.
    """
    plan = job.kind.plan(job, start="all programs" if job.config.background_compile is False else "one program")
    with plan.weights.released():
        if is_staged(job):
            return load_staged(job, plan)
        kept = place.costs_of(job.kind.variant, plan.options) if place is not None else None
        with job.kind.memory(plan.lowered.shape, plan.variants) as memory:
            programs = compile_all(plan, job.on_progress)
            programs = replace(programs, kept_costs=kept.read() if kept is not None else {})
            runner = job.kind.runner(job, programs, memory)
        deferred = SecondProgram(plan, job.on_progress) if plan.later is not None else None
        return Loaded(runner, programs, job.config, "compiled", deferred, kept_costs=kept)


def runner_of(job: Job[V, S, R], programs: CompiledPrograms[V, S]) -> R:
    """Return what runs programs that are all there, in memory that is allocated now."""
    with job.kind.memory(programs.shape, list(programs.compiled)) as memory:
        return job.kind.runner(job, programs, memory)


def is_staged(job: LoadJob[Any]) -> bool:
    """Return whether the fewest programs that can serve are compiled first, and the others in the background."""
    if not job.kind.compiles_in_background or program_mode(job.device, job.config) != "separate":
        return False
    wanted = job.config.background_compile
    return kind(job.device) != "CPU" if wanted is None else wanted


def load_staged(job: Job[V, S, R], plan: CompilePlan[V, S], store: ProgramStore[V, S] | None = None) -> Loaded[V, S, R]:
    """Compile the fewest programs that can serve; the other variants are deferred. ``store`` gets all programs at the end.

    Raises:
        DeviceError: the device refused a program.
        ConfigError: there is not enough memory for KV slots or masks.
    """
    first = job.kind.first_to_serve(plan.variants)
    with job.kind.memory(plan.lowered.shape, plan.variants) as memory:
        programs = compile_all(plan.restricted(first), job.on_progress)
        runner = job.kind.runner(job, programs, memory, plan.variants)
    others = (variant for variant in plan.variants if variant not in first)
    deferred = DeferredPrograms(plan, others, job.on_progress, store)
    return Loaded(runner, programs, job.config, "compiled", deferred)
