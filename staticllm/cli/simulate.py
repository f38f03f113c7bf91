"""``staticllm simulate`` runs scheduling policies on a virtual clock."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import click

from staticllm.cli.grouped_command import GroupedCommand, option_file
from staticllm.cli.options import Number, model_option
from staticllm.cli.progress import progress
from staticllm.cli.validate import compare_with_engine
from staticllm.config import StaticLLMConfig, schedulers

if TYPE_CHECKING:
    from staticllm.pipelines.simulator.cluster import Run
    from staticllm.pipelines.simulator.drafting import Drafting
    from staticllm.pipelines.simulator.scenario import Scenario
    from staticllm.pipelines.simulator.simulated_device import DeviceModel
    from staticllm.pipelines.simulator.summary import RunSummary
    from staticllm.pipelines.simulator.workload import Arrival

LOAD = 0.6
"""The default rate as a share of the maximum rate. Near the maximum, the queue depends more on arrivals than on the policy."""
HEADER = (
    f"{'policy':<14}{'requests/s':>11}{'tokens/s':>10}{'TTFT ms':>11}{'p95':>11}{'TPOT ms':>10}{'decoding':>10}"
    f"{'longest gap':>13}{'p95':>9}{'latency ms':>12}{'fairness':>10}{'busy':>7}{'jobs':>7}"
)


GROUPS = {
    "Targets": ("ttft_ms", "tpot_ms", "gap_ms"),
    "Comparisons": ("validate", "model", "device"),
    "Output": ("as_json", "plot", "save_costs"),
}
RARE = {
    "Costs of calls": (
        "costs", "programs", "weights_ms", "row_ms", "attention_us", "host_ms", "swap_us", "job_ms",
    ),
    "Limits": ("concurrency", "max_num_seqs", "kv_slots", "host_kv_slots"),
    "Answers and drafts": ("answers", "beams", "draft_tokens", "accept", "draft_ms"),
    "Several devices": ("devices", "disaggregate", "transfer_ms", "slot_bytes", "bandwidth", "dispatch"),
}  # fmt: skip


@click.command("simulate", cls=GroupedCommand, groups=GROUPS, rare=RARE)
@click.option(
    "--policy", "policies", multiple=True, type=click.Choice(schedulers()), help="May be repeated.  [dynamic, fcfs]"
)
@click.option("-n", "--requests", type=click.IntRange(1), default=200, show_default=True, help="Number of requests.")
@click.option(
    "--arrivals",
    type=click.Choice(["poisson", "uniform", "burst"]),
    default="poisson",
    show_default=True,
    help="Arrival process; a burst arrives all at once.",
)
@click.option("--rate", type=Number(0, 1e9, min_open=True), help="Requests per second.  [60 % of the maximum rate]")
@click.option("--prompt", default="256", show_default=True, help="Tokens per prompt: N, or LEAST-MOST.")
@click.option("--output", default="256", show_default=True, help="Tokens per answer: N, or LEAST-MOST.")
@click.option("--answers", type=click.IntRange(1, 128), default=1, show_default=True, help="Answers per request.")
@click.option("--beams", type=click.IntRange(1, 64), default=1, show_default=True, help="Beams per request instead.")
@click.option(
    "--draft-tokens", type=click.IntRange(1, 64), help="Draft up to N tokens per request and call, where it pays."
)
@click.option(
    "--accept", type=Number(0, 1), default=0.7, show_default=True, help="Probability that a drafted token is accepted."
)
@click.option(
    "--draft-ms", type=float, default=0.0, show_default=True, help="Draft model's ms per token; 0 for prompt lookup."
)
@click.option(
    "--trace", type=click.Path(), help="Read requests from a file instead, JSON lines or CSV: arrival, prompt, output."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of arrivals and lengths.")
@click.option(
    "--devices", type=click.IntRange(1), default=1, show_default=True, help="Devices that prefill and decode."
)
@click.option("--disaggregate", metavar="PxD", help="Use P devices that prefill and D that decode instead.")
@click.option("--transfer-ms", type=float, default=0.0, show_default=True, help="Latency from P to D, per request.")
@click.option("--slot-bytes", type=float, default=0.0, show_default=True, help="Bytes from P to D, per token.")
@click.option(
    "--bandwidth",
    type=Number(0, 1e9, min_open=True),
    default=10.0,
    show_default=True,
    help="Bandwidth from P to D, GB/s.",
)
@click.option(
    "--dispatch",
    type=click.Choice(["least_loaded", "two_choices", "round_robin"]),
    default="least_loaded",
    show_default=True,
    help="Which device takes a request.",
)
@click.option("--concurrency", type=click.IntRange(1), help="Most requests admitted at a time; others queue.")
@click.option("--max-num-seqs", type=click.IntRange(1), help="Most requests running at a time.  [as the pipeline]")
@click.option("--kv-slots", type=click.IntRange(1), help="KV slots of the arena.  [as the pipeline]")
@click.option("--host-kv-slots", type=click.IntRange(0), help="KV slots of the host pool.  [as the pipeline]")
@click.option("--ttft-ms", type=Number(0, 1e9, min_open=True), help="Target for the time to first token.")
@click.option("--tpot-ms", type=Number(0, 1e9, min_open=True), help="Target for the time between two tokens.")
@click.option(
    "--gap-ms",
    type=Number(0, 1e9, min_open=True),
    default=StaticLLMConfig.gap_ms,
    show_default=True,
    help="Longest wait of a request that has begun for a place among the running ones.",
)
@click.option("--programs", type=click.Choice(["shared", "separate"]), default="shared", show_default=True,
              help="Which programs the device has, without --costs.")  # fmt: skip
@click.option("--costs", type=click.Path(), help="Read costs from a file, JSON: rows, kv_len, sequences, seconds.")
@click.option("--weights-ms", type=float, default=20.0, show_default=True, help="Without --costs: ms per call,")
@click.option("--row-ms", type=float, default=0.5, show_default=True, help="plus ms per row,")
@click.option(
    "--attention-us", type=float, default=0.05, show_default=True, help="plus us per row and slot that it sees."
)
@click.option("--host-ms", type=float, default=0.0, show_default=True, help="Host time between two calls.")
@click.option("--swap-us", type=float, default=0.0, show_default=True, help="Host time per KV slot that is swapped.")
@click.option(
    "--job-ms",
    type=Number(0, 1e6, min_open=True),
    help="Calls of another model, such as documents to embed, that always wait on each device: ms per call.",
)
@click.option("--save-costs", type=click.Path(), help="Write the costs to a file; with --validate, the measured ones.")
@click.option("--validate", is_flag=True, help="Compare with the engine, on this machine.")
@option_file
@model_option
@click.option("--device", default="CPU", show_default=True, help="Device for --validate.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--plot", type=click.Path(), help="Plot the runs to a file: PNG, SVG, PDF.")
def command(**options: Any) -> None:
    """Run scheduling policies, the same objects as in the engine, on a virtual clock with given costs per call.

    The model is loaded only for --validate; otherwise --costs, or --weights-ms and the options after it, set the costs.
    """
    if options["plot"] and options["validate"]:
        raise click.UsageError("--plot draws simulated runs: leave out --validate")
    options["policies"] = list(dict.fromkeys(options["policies"])) or ["dynamic", "fcfs"]
    if options["validate"]:
        compare_with_engine(options)
    else:
        _simulate(options)


def _simulate(options: dict[str, Any]) -> None:
    from staticllm.pipelines.simulator.cost_model import write_costs
    from staticllm.pipelines.simulator.plot import check_plot, plot_runs
    from staticllm.pipelines.simulator.summary import summarize_run

    if options["plot"]:
        check_plot(options["plot"])
    with progress("simulating"):
        scenario = _scenario(options)
        if options["save_costs"]:
            write_costs(options["save_costs"], scenario.model.index.variants, scenario.model.cost)
    runs: dict[str, Run] = {}
    results: dict[str, RunSummary] = {}
    if not options["as_json"]:
        click.echo(HEADER)
    with progress("simulating") as shown:
        if options["job_ms"] is not None:
            scenario = scenario.with_jobs(options["job_ms"] / 1e3)
        for number, policy in enumerate(options["policies"]):
            shown.show(f"simulating {policy}", number, len(options["policies"]))
            runs[policy] = scenario.run(policy)
            results[policy] = summarize_run(runs[policy])
            if not options["as_json"]:
                shown.write(_line(policy, results[policy]))
                if results[policy].num_drafted:
                    shown.write(_drafts_line(results[policy]))
    if options["as_json"]:
        click.echo(json.dumps({policy: summary.as_dict() for policy, summary in results.items()}, indent=2))
    if options["plot"]:
        plot_runs(runs, options["plot"])


def _drafts_line(s: RunSummary) -> str:
    return f"{'':<14}{s.num_accepted} of {s.num_drafted} drafted tokens accepted"


def _line(policy: str, s: RunSummary) -> str:
    return (
        f"{policy:<14}{s.requests_per_second:>11.3f}{s.tokens_per_second:>10.1f}{s.ttft_ms:>11.1f}"
        f"{s.ttft_p95_ms:>11.1f}{s.tpot_ms:>10.2f}{s.decode_tpot_ms:>10.2f}{s.longest_gap_ms:>13.1f}{s.gap_p95_ms:>9.1f}"
        f"{s.latency_ms:>12.1f}{s.fairness:>10.3f}{s.busy:>7.1%}{s.job_share:>7.1%}"
    )


def _scenario(options: dict[str, Any]) -> Scenario:
    """Return the devices and the requests, at the given rate or else at ``LOAD`` of the devices' maximum rate.

    A rate above the maximum gives a warning on stderr: the queue then grows until the last request arrives, and the latencies
    measure the length of the queue, not the quality of the policy.
    """
    from staticllm.pipelines.simulator.cluster import Link
    from staticllm.pipelines.simulator.scenario import Scenario, max_rate, offered_rate

    arrivals = _arrivals(options, 1.0 if options["rate"] is None else options["rate"])
    prefill, decode = _devices(options)
    scenario = Scenario(
        _model(options, arrivals), tuple(arrivals), prefill, decode,
        Link(options["transfer_ms"] / 1e3, options["slot_bytes"], options["bandwidth"] * 1e9),
        options["dispatch"], options["concurrency"],
    )  # fmt: skip
    if options["arrivals"] == "burst" and not options["trace"]:
        return scenario
    served = max_rate(scenario)
    if options["rate"] is None and not options["trace"]:
        rate = LOAD * served
        click.echo(f"{rate:.3g} requests/s arrive, {LOAD:.0%} of the maximum rate of {served:.3g}", err=True)
        return replace(scenario, arrivals=tuple(_arrivals(options, rate)))
    if (rate := offered_rate(arrivals)) > served:
        click.echo(
            f"Warning: {rate:.3g} requests/s arrive, about {served:.3g} can be served: the queue grows, and latencies show "
            "how long it became; lower --rate to compare policies",
            err=True,
        )
    return scenario


def _arrivals(options: dict[str, Any], rate: float) -> list[Arrival]:
    from staticllm.pipelines.simulator import workload

    if options["trace"]:
        return workload.read_trace(options["trace"])
    if options["answers"] > 1 and options["beams"] > 1:
        raise click.UsageError("--answers and --beams are two ways to decode: give one of them")
    lengths = workload.Lengths(_range("--prompt", options["prompt"]), _range("--output", options["output"]))
    count, seed = options["requests"], options["seed"]
    if options["arrivals"] == "burst":
        found = workload.burst(count, lengths, seed)
    else:
        found = (workload.poisson if options["arrivals"] == "poisson" else workload.uniform)(rate, count, lengths, seed)
    size = max(options["answers"], options["beams"])
    return [replace(arrival, num_answers=size, are_beams=options["beams"] > 1) for arrival in found]


def _model(options: dict[str, Any], arrivals: list[Arrival]) -> DeviceModel:
    from staticllm.pipelines.programs.variant_index import VariantIndex
    from staticllm.pipelines.simulator.cost_model import AnalyticCosts, HostCost, read_costs
    from staticllm.pipelines.simulator.scenario import configured_model, longest, tabled_model

    for name in ("weights_ms", "row_ms", "attention_us", "host_ms", "swap_us", "transfer_ms", "slot_bytes", "draft_ms"):
        if not 0 <= options[name] < float("inf"):
            raise click.UsageError(f"--{name.replace('_', '-')} {options[name]:g}: must be 0 or more")
    prompt, output = longest(arrivals)
    names = ("max_num_seqs", "kv_slots", "host_kv_slots", "ttft_ms", "tpot_ms", "gap_ms")
    config = StaticLLMConfig(max_prompt_len=prompt, min_response_len=output, **{name: options[name] for name in names})
    host = HostCost(options["host_ms"] / 1e3, swap=options["swap_us"] / 1e6)
    if options["costs"]:
        variants, table = read_costs(options["costs"])
        model = tabled_model(config, VariantIndex(variants), table, host)
    else:
        mode: Literal["shared", "separate"] = options["programs"]
        cost = AnalyticCosts(options["weights_ms"] / 1e3, options["row_ms"] / 1e3, options["attention_us"] / 1e6)
        model = configured_model(config, mode, cost, host)
    has_beams = any(arrival.are_beams for arrival in arrivals)
    return replace(model, drafting=_drafting(options), prefix_caching=has_beams)


def _drafting(options: dict[str, Any]) -> Drafting | None:
    from staticllm.pipelines.simulator.drafting import Drafting

    if options["draft_tokens"] is None:
        return None
    return Drafting(options["draft_tokens"], options["accept"], options["draft_ms"] / 1e3)


def _devices(options: dict[str, Any]) -> tuple[int, int]:
    if not options["disaggregate"]:
        return options["devices"], 0
    match = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", options["disaggregate"])
    if not match:
        raise click.UsageError(
            f"--disaggregate {options['disaggregate']!r}: must be PxD, two whole numbers from 1: 6x2"
        )
    if options["devices"] != 1:
        raise click.UsageError("--devices both prefill and decode: with --disaggregate leave it out")
    return int(match[1]), int(match[2])


def _range(name: str, text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", text)
    if not match or not 1 <= int(match[1]) <= int(match[2] or match[1]):
        raise click.UsageError(f"{name} {text!r}: must be a whole number from 1, or two: 64-512")
    return int(match[1]), int(match[2] or match[1])
