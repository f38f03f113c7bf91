"""Makes a warm runner: binds compiled programs, and runs them before the first request to pack weights and measure costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from staticllm.adapters.adapter_set import AdapterSet
from staticllm.core import OnProgress, ProgressEvent, Variant
from staticllm.system.long_calls import attended, told

from ...compiler_passes.compiling.compile import DecoderPrograms
from ...kvcache.step import BufferPool, StepBuffers
from ..costs.model import CostModel
from ..costs.probe import timed_run
from .bind import BoundPrograms, HostMemory, Program, allocate, bind
from .model_runner import ModelRunner

FIRST_ROWS = (16, 1)
"""Rows of the calls that a shared program always runs, in order: a short prompt packs most of the weights."""
TOTAL_SECONDS = 0.1
"""Time budget for running a shared program at further sizes, in seconds."""
NEAR_ROWS, FAR_ROWS, FAR_KV_LEN = (1, 4, 16, 64, 256), (1, 4, 64), 1024
"""Sizes from which all costs are estimated until the engine rests."""
QUICK_SECONDS = 0.05
"""Variants whose first run is shorter are timed again: most of a first run is one-time work."""


def make_runner(
    programs: DecoderPrograms,
    on_progress: OnProgress = lambda event: None,
    planned: Sequence[Variant] = (),
    memory: Future[HostMemory] | None = None,
    adapters: AdapterSet | None = None,
) -> ModelRunner:
    """Bind programs to the arena and to buffers, and warm them up.

    ``planned``: all variants, if some of them are compiled later; memory is allocated for these as well. ``memory``: is being
    allocated already. ``adapters``: what the inputs of ``shape.adapted`` hold.

    Raises:
        ConfigError: there is not enough memory for the arena or the masks.
    """
    shape = programs.shape
    variants = tuple(planned) or tuple(programs.compiled)
    host = allocate(shape, variants) if memory is None else memory.result()
    cache = host.cache
    pool = host.pool
    if adapters is not None:
        for name, matrix in adapters.matrices(shape.adapted, shape.adapter_type).items():
            pool.adapters[name][:] = matrix
    bound = BoundPrograms(
        programs.compiled, lambda variant, compiled: bind(compiled, shape, cache, StepBuffers(variant, pool))
    )
    costs = warm_up(bound, programs.costs, on_progress, programs.kept_costs)
    if shape.page_size:
        costs.weigh_by(lambda variant: variant.work_in_pages)
    return ModelRunner(cache, bound, costs, planned, inserted=_inserted(programs, variants, host))


def _inserted(programs: DecoderPrograms, variants: Sequence[Variant], host: HostMemory) -> Mapping[Variant, Program]:
    """Return the programs of decode steps once more, over memory of their own, if there are blocks between which they can run."""
    decoding = [variant for variant in variants if variant.rows == variant.sequences]
    if programs.options.layout != "blocks" or not decoding:
        return {}
    shape = programs.shape
    pool = BufferPool(decoding, shape, host.pool.adapters)
    compiled = {variant: program for variant, program in programs.compiled.items() if variant in decoding}
    return BoundPrograms(
        compiled, lambda variant, program: bind(program, shape, host.cache, StepBuffers(variant, pool))
    )


def warm_up(
    bound: BoundPrograms,
    known_costs: Mapping[Variant, float],
    on_progress: OnProgress,
    kept_costs: Mapping[Variant, float] | None = None,
) -> CostModel[Variant]:
    """Run each program at least once, so that no request waits for a first inference, and return the first costs.

    A shared program runs with ``FIRST_ROWS``, and at other sizes, with small and large KV lengths, until ``TOTAL_SECONDS`` have
    passed: its first run at a new size costs 10 % more than the next one (docs/decisions.md). With ``known_costs`` (seconds),
    each program runs once, to pack its weights. ``kept_costs`` (seconds) are stable costs of an earlier process.
    """
    if known_costs or kept_costs:
        costs = _first_runs(bound, known_costs, on_progress)
        costs.adopt({variant: seconds for variant, seconds in (kept_costs or {}).items() if variant in bound})
        return costs
    costs = CostModel[Variant]()
    chosen = _worth_running(bound)
    packed: set[int] = set()
    total = 0.0
    for index, variant in enumerate(chosen, 1):
        first = 0.0
        event = ProgressEvent("warm-up", index, len(chosen), first, variant)
        key = id(bound.compiled(variant))
        is_needed = key not in packed or bound.is_static(variant) or _turn(variant) < len(FIRST_ROWS)
        if is_needed or total + costs(variant) < TOTAL_SECONDS:
            program = bound[variant]
            with told(on_progress, event):
                first = attended(partial(timed_run, program))
            is_worth_it = first < QUICK_SECONDS or key not in packed  # a program's first run packs its weights
            seconds = attended(partial(timed_run, program)) if is_worth_it else first
            costs.update(variant, seconds)
            packed.add(key)
            total += first + seconds
        on_progress(replace(event, seconds=first))
    return costs


def _first_runs(
    bound: BoundPrograms, known_costs: Mapping[Variant, float], on_progress: OnProgress
) -> CostModel[Variant]:
    costs = CostModel({variant: seconds for variant, seconds in known_costs.items() if variant in bound})
    first = list({id(bound.compiled(variant)): variant for variant in reversed(list(bound))}.values())[::-1]
    for index, variant in enumerate(first, 1):
        event = ProgressEvent("warm-up", index, len(first), 0.0, variant)
        with told(on_progress, event):
            seconds = attended(partial(timed_run, bound[variant]))
        on_progress(replace(event, seconds=seconds))
    return costs


def _worth_running(programs: BoundPrograms) -> list[Variant]:
    """Return the variants to time, in the order of the programs: those of ``FIRST_ROWS`` first, then decoding."""
    chosen: dict[tuple[int, bool], Variant] = {}
    for variant in sorted(programs, key=lambda variant: (variant.kv_len, variant.sequences)):
        is_far = variant.kv_len >= FAR_KV_LEN
        if variant.rows in (FAR_ROWS if is_far else NEAR_ROWS):
            chosen.setdefault((variant.rows, is_far), variant)
    found = [variant for variant in programs if variant in chosen.values() or programs.is_static(variant)]
    return sorted(found, key=_turn)


def _turn(variant: Variant) -> int:
    is_first = variant.rows in FIRST_ROWS and variant.kv_len < FAR_KV_LEN
    return FIRST_ROWS.index(variant.rows) if is_first else len(FIRST_ROWS)
