"""Compiles programs for this start: all at once, or the fewest that can serve first and the others in the background."""

from __future__ import annotations

from dataclasses import replace

import openvino as ov

from staticllm.devices import kind
from staticllm.pipelines.blobs.measurements import CostsPlace
from staticllm.pipelines.model_loader.job import LoadJob, probes_of
from staticllm.pipelines.model_loader.loaded import DeferredPrograms, Loaded, ProgramStore, SecondProgram
from staticllm.pipelines.programs.build import Allocation, compile_all, make_runner
from staticllm.pipelines.programs.compile_plan import CompilePlan, prepare
from staticllm.pipelines.programs.layout import program_mode
from staticllm.pipelines.programs.variants import first_to_serve


def load_compiled(job: LoadJob, place: CostsPlace | None = None) -> Loaded:
    """Compile the model; no blobs are written. ``place``: where the costs of its programs are kept, if anywhere.

    Raises:
        ModelError: a file of the model is missing or damaged.
        UnsupportedModelError: a pass cannot lower the model.
        DeviceError: the device is missing, or refused a program.
        ConfigError: an option is impossible for this model, or there is not enough memory for KV slots or masks.
    """
    core, plan = prepare(
        job.directory,
        job.device,
        job.config,
        job.on_progress,
        start="all programs" if job.config.background_compile is False else "one program",
        probes=probes_of(job),
    )
    with plan.weights.released():
        if is_staged(job):
            return load_staged(job, core, plan)
        kept = place.costs_of(plan.options) if place is not None else None
        with Allocation(plan.lowered.shape, plan.variants) as memory:
            programs = compile_all(core, plan, job.on_progress)
            programs = replace(programs, kept_costs=kept.read() if kept is not None else {})
            runner = make_runner(programs, job.on_progress, memory=memory)
        deferred = SecondProgram(plan, job.on_progress) if plan.later is not None else None
        return Loaded(runner, programs, job.config, "compiled", deferred, kept_costs=kept)


def is_staged(job: LoadJob) -> bool:
    """Return whether the fewest programs that can serve are compiled first, and the others in the background."""
    if program_mode(job.device, job.config) != "separate":
        return False
    wanted = job.config.background_compile
    return kind(job.device) != "CPU" if wanted is None else wanted


def load_staged(job: LoadJob, core: ov.Core, plan: CompilePlan, store: ProgramStore | None = None) -> Loaded:
    """Compile the fewest programs that can serve; the other variants are deferred. ``store`` gets all programs at the end.

    Raises:
        DeviceError: the device refused a program.
        ConfigError: there is not enough memory for KV slots or masks.
    """
    first = first_to_serve(plan.variants)
    with Allocation(plan.lowered.shape, plan.variants) as memory:
        programs = compile_all(core, plan.restricted(first), job.on_progress)
        runner = make_runner(programs, job.on_progress, planned=plan.variants, memory=memory)
    others = (variant for variant in plan.variants if variant not in first)
    deferred = DeferredPrograms(plan, others, job.on_progress, store)
    return Loaded(runner, programs, job.config, "compiled", deferred)
