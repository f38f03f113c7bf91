"""Compiles programs for this start: all at once, or the fewest that can serve first and the others in the background."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import openvino as ov

from staticllm.core import Part
from staticllm.devices import kind
from staticllm.pipelines.model_loader.job import LoadJob
from staticllm.pipelines.model_loader.loaded import DeferredPrograms, Loaded, ProgramStore
from staticllm.pipelines.programs.build import compile_all, make_runner
from staticllm.pipelines.programs.compile_plan import CompilePlan, prepare
from staticllm.pipelines.programs.layout import program_mode
from staticllm.pipelines.programs.variants import first_to_serve


def load_compiled(job: LoadJob) -> Loaded:
    """Compile the model; nothing is written.

    Raises:
        ModelError: a file of the model is missing or damaged.
        UnsupportedModelError: a pass cannot lower the model.
        DeviceError: the device is missing, or refused a program.
        ConfigError: an option is impossible for this model, or there is not enough memory for KV slots or masks.
    """
    core, plan = prepare(job.directory, job.device, job.config, job.on_progress)
    with plan.weights.released():
        if is_staged(job):
            return load_staged(job, core, plan)
        if plan.options.layout == "few_rows" and job.config.background_compile is not False:
            return _few_rows_later(job, core, plan)
        programs = compile_all(core, plan, job.on_progress)
        return Loaded(make_runner(programs, job.on_progress), programs, job.config, "compiled")


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
    programs = compile_all(core, plan.restricted(first), job.on_progress)
    runner = make_runner(programs, job.on_progress, planned=plan.variants)
    others = (variant for variant in plan.variants if variant not in first)
    deferred = DeferredPrograms(plan, others, job.on_progress, store)
    return Loaded(runner, programs, job.config, "compiled", deferred)


def _few_rows_later(job: LoadJob, core: ov.Core, plan: CompilePlan) -> Loaded:
    """Compile one program for all variants; a faster one for calls of few rows is compiled in the background."""
    shared: dict[Part, Mapping[str, Any]] = {
        part: values for part, values in plan.options.properties.items() if part != "few_rows"
    }
    options = replace(plan.options, layout="shared", properties=shared)
    programs = compile_all(core, replace(plan, options=options), job.on_progress)
    few = tuple(variant for variant in plan.variants if variant.rows <= plan.options.few_rows)
    deferred = DeferredPrograms(plan, few, job.on_progress)
    return Loaded(make_runner(programs, job.on_progress), programs, job.config, "compiled", deferred)
