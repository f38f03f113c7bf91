"""The result of loading: programs that can run now, and programs that are compiled while the model serves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Generic, Literal, Protocol

import openvino as ov

from staticllm.config import StaticLLMConfig
from staticllm.core import OnProgress
from staticllm.pipelines.artifacts.measurements import KeptCosts
from staticllm.pipelines.loading.kind import R
from staticllm.pipelines.programs.build import CompiledPrograms, compile_each
from staticllm.pipelines.programs.compile_plan import CompilePlan
from staticllm.pipelines.programs.lowered import S, V
from staticllm.system.file_lock import Lease

Origin = Literal["compiled", "blob", "cache"]


class ProgramStore(Protocol[V, S]):
    """A place for compiled programs, for example a blob set that does not exist yet."""

    def write(self, programs: CompiledPrograms[V, S]) -> None:
        """Export and write ``programs``, which are all programs of a model."""


class DeferredPrograms(Generic[V, S]):
    """Variants that are compiled while the model serves.

    ``weights`` are those of the plan. One thread calls ``choose``, then ``compile`` for each of ``variants``, then ``store`` with
    all programs of the model. It calls ``release`` at the end, also after an error. The cache entry that will be written is
    locked until then.
    """

    def __init__(
        self,
        plan: CompilePlan[V, S],
        variants: Iterable[V],
        on_progress: OnProgress,
        store: ProgramStore[V, S] | None = None,
    ) -> None:
        self.variants, self.weights = tuple(variants), plan.weights
        self._plan, self._on_progress = plan, on_progress
        self._store = store
        self._lease: Lease | None = None
        self._compiled: dict[V, ov.CompiledModel] = {}

    def choose(self) -> None:
        """Choose ``variants``, if that was left for later. The compiling thread calls this first."""

    @property
    def programs(self) -> list[tuple[V, ...]]:
        """The variants of each program that will be compiled."""
        if self._plan.options.mode == "separate":
            return [(variant,) for variant in self.variants]
        return [self.variants] if self.variants else []

    def compile(self, variant: V) -> ov.CompiledModel:
        """Compile one of ``variants``, or return its program. Variants that share a program are compiled with the first of them.

        Raises:
            DeviceError: the device refused the program.
        """
        if variant not in self._compiled:
            together = (variant,) if self._plan.options.mode == "separate" else self.variants
            plan = self._plan.restricted(together)
            self._compiled.update(compile_each(plan, self._on_progress))
        return self._compiled[variant]

    def store(self, programs: CompiledPrograms[V, S]) -> None:
        """Write all programs of the model to the requested blob set, if there is one."""
        if self._store is not None:
            self._store.write(programs)

    def hold(self, lease: Lease) -> None:
        """Keep the cache entry locked until ``release``, which the compiling thread calls."""
        lease.hand_over()
        self._lease = lease

    def release(self) -> None:
        """Unlock the cache entry. A second call does nothing."""
        if self._lease is not None:
            self._lease.release()


class SecondProgram(DeferredPrograms[V, S]):
    """The variants that get a program of their own while one program for all variants serves. A probe may choose them."""

    def __init__(self, plan: CompilePlan[V, S], on_progress: OnProgress) -> None:
        super().__init__(plan, (), on_progress)

    def choose(self) -> None:
        """Choose the options of the second program, and the variants that get it."""
        assert self._plan.later is not None, "all programs are there"
        options = self._plan.later()
        self._plan = replace(self._plan, options=options, later=None)
        apart = (variant for variant in self._plan.variants if options.program_group(variant).part)
        self.variants = tuple(variant for variant in apart if options.program_group(variant).part != "prefill")


@dataclass(frozen=True)
class Loaded(Generic[V, S, R]):
    """A model that can run.

    ``config``: the config in force, because a blob set decides what the user left open. ``has_mapped_weights``: whether weights
    are read from their file as long as the model runs. ``kept_costs``: where the costs of its programs are kept, if anywhere.
    """

    runner: R
    programs: CompiledPrograms[V, S]
    config: StaticLLMConfig
    origin: Origin
    deferred: DeferredPrograms[V, S] | None = None
    has_mapped_weights: bool = True
    kept_costs: KeptCosts[V] | None = None

    def keep_costs(self) -> None:
        """Write the costs that were measured at leisure, if there is a place for them and they are new."""
        if self.kept_costs is not None:
            self.kept_costs.write(self.runner.stable_costs)

    def without_programs(self) -> Loaded[V, S, R]:
        """Return what is known of a model that was closed, without its programs and graphs."""
        return replace(self, programs=replace(self.programs, compiled={}), deferred=None)
