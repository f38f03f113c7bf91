"""What an engine holds for one runner: its table, slots, batches and drafts."""

from __future__ import annotations

from dataclasses import dataclass

from staticllm.core import Clock

from ..programs.model_runner import ModelRunner
from ..scheduling.request_table import RequestTable
from .batch import BatchBuilder, Quarantine
from .kv_manager import KVCacheManager, make_kv_manager
from .options import EngineOptions
from .speculation.draft_planner import DraftPlanner


@dataclass(frozen=True)
class DeviceState:
    """A runner with an empty request table and an empty KV cache. ``replaced`` gives the state of another runner."""

    runner: ModelRunner
    options: EngineOptions
    table: RequestTable
    kv_manager: KVCacheManager
    quarantine: Quarantine
    draft_planner: DraftPlanner
    batches: BatchBuilder

    @property
    def is_offloading(self) -> bool:
        """Whether cached slots are on their way to the host pool; a step moves them even without requests."""
        return self.kv_manager.prefix.is_offloading

    @property
    def has_unknown_costs(self) -> bool:
        """Whether some variant's cost is not measured and should be."""
        return self.options.measure_costs and not self.runner.probe.is_done

    def replaced(self, runner: ModelRunner, options: EngineOptions, clock: Clock) -> DeviceState:
        """Return the state of another runner; it takes over the draft model, and idle sequences without their slots."""
        other = device_state(runner, options, clock, self.draft_planner)
        other.kv_manager.idle.take_over(self.kv_manager.idle)
        return other


def device_state(
    runner: ModelRunner, options: EngineOptions, clock: Clock, drafts: DraftPlanner | None = None
) -> DeviceState:
    """Return the state of a runner. ``drafts``: the planner whose draft model is used on."""
    table = RequestTable(options.limits)
    manager = make_kv_manager(runner.cache, table, options, clock, lambda: runner.rotations)
    quarantine = Quarantine()
    planner = DraftPlanner(runner, options.max_seq_len, drafts.model if drafts else None)
    batches = BatchBuilder(runner, table, manager, quarantine, planner)
    return DeviceState(runner, options, table, manager, quarantine, planner, batches)
