"""A scenario is a workload with devices and costs, on which policies can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from staticllm.config import StaticLLMConfig
from staticllm.core import ProgramMode
from staticllm.errors import ConfigError
from staticllm.pipelines.programs.variant_index import VariantIndex
from staticllm.pipelines.programs.variants import choose_variants
from staticllm.pipelines.scheduling.interface import Policy
from staticllm.pipelines.scheduling.planner import make_policy
from staticllm.pipelines.scheduling.request_table import Limits
from staticllm.pipelines.simulator.cluster import Cluster, Dispatch, Link, Pool, Run
from staticllm.pipelines.simulator.cost_model import Cost, HostCost
from staticllm.pipelines.simulator.simulated_device import DeviceModel
from staticllm.pipelines.simulator.simulated_jobs import BulkJobs
from staticllm.pipelines.simulator.summary import summarize
from staticllm.pipelines.simulator.workload import Arrival

BUSY_REQUESTS = 64
"""The number of requests per device that measure its maximum rate, so that filling and draining are a small part of the run."""


@dataclass(frozen=True)
class Scenario:
    """A workload and the devices that serve it.

    ``num_devices`` devices prefill and decode; if ``num_decode_devices`` is not 0, they only prefill, and the others decode.
    ``link`` is the transfer of KV slots between the two kinds. ``dispatch`` decides which device receives a request. At most
    ``concurrency`` requests are admitted at a time; None means no limit. Every device has its own object of the policy.
    """

    model: DeviceModel
    arrivals: tuple[Arrival, ...]
    num_devices: int = 1
    num_decode_devices: int = 0
    link: Link = field(default_factory=Link)
    dispatch: Dispatch = "least_loaded"
    concurrency: int | None = None

    def with_jobs(self, seconds: float) -> Scenario:
        """Return the same scenario with calls of another model, of ``seconds`` each, that always wait until the last arrival."""
        jobs = BulkJobs(seconds, max(arrival.time for arrival in self.arrivals))
        return replace(self, model=replace(self.model, jobs=jobs))

    def run(self, policy: str) -> Run:
        """Simulate every request from its arrival to its end, under the policy with this name.

        Raises:
            ConfigError: the policy is unknown, or a request is too large for the devices.
        """

        def make() -> Policy:
            return make_policy(policy)

        first = Pool(self.model, make, self.num_devices, self.dispatch)
        decode = Pool(self.model, make, self.num_decode_devices, self.dispatch) if self.num_decode_devices else None
        return Cluster(first, decode, self.link, self.concurrency).run(self.arrivals)


def max_rate(scenario: Scenario) -> float:
    """Return the requests per second that the devices serve under ``fcfs`` while requests are always waiting."""
    devices = scenario.num_devices + scenario.num_decode_devices
    count = max(1, min(len(scenario.arrivals), BUSY_REQUESTS * devices))
    at_once = tuple(replace(arrival, time=0.0) for arrival in scenario.arrivals[:count])
    answers = summarize(replace(scenario, arrivals=at_once).run("fcfs").requests).requests_per_second
    return answers * count / sum(arrival.num_answers for arrival in at_once)


def offered_rate(arrivals: Sequence[Arrival]) -> float:
    """Return the number of requests that arrive per second; infinite if they all arrive at once."""
    span = max(arrival.time for arrival in arrivals) - min(arrival.time for arrival in arrivals)
    return (len(arrivals) - 1) / span if span > 0 else float("inf")


def longest(arrivals: Sequence[Arrival]) -> tuple[int, int]:
    """Return the lengths of the longest prompt and of the longest answer, in tokens."""
    return max(arrival.num_prompt for arrival in arrivals), max(arrival.num_output for arrival in arrivals)


def configured_model(config: StaticLLMConfig, mode: ProgramMode, cost: Cost, host: HostCost) -> DeviceModel:
    """Return a device with the programs, ``max_num_seqs`` and KV slots that the pipeline would have with this config."""
    limits = Limits(config.num_seqs(mode), config.ttft_ms, config.tpot_ms, config.gap_ms)
    index = VariantIndex(choose_variants(config, mode))
    return DeviceModel(index, cost, limits, config.num_kv_slots(mode), config.num_host_slots, config.max_seq_len, host)


def tabled_model(config: StaticLLMConfig, index: VariantIndex, cost: Cost, host: HostCost) -> DeviceModel:
    """Return a device with exactly the programs of a table. By default its arena has as many KV slots as the largest ``kv_len``.

    Raises:
        ConfigError: no program for one sequence can read all KV slots, or a sequence needs more KV slots than the arena has.
    """
    kv_slots = config.kv_slots or max(variant.kv_len for variant in index.variants)
    if not any(variant.sequences == 1 and variant.kv_len >= kv_slots for variant in index.variants):
        raise ConfigError(
            f"no program for one sequence has a kv_len of {kv_slots}: add one to the costs, or lower KV_SLOTS"
        )
    if config.max_seq_len > kv_slots:
        raise ConfigError(
            f"prompt and answer of {config.max_seq_len} tokens, the costs have programs for {kv_slots} KV slots: "
            "shorten them or measure with longer ones"
        )
    num_seqs = config.max_num_seqs or index.max_decoding(0)
    limits = Limits(num_seqs, config.ttft_ms, config.tpot_ms, config.gap_ms)
    return DeviceModel(index, cost, limits, kv_slots, config.num_host_slots, config.max_seq_len, host)
