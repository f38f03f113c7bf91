"""``staticllm simulate`` runs scheduling policies on a virtual clock, and compares the clock with the engine."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Literal

import click

from staticllm.cli.grouped_command import GroupedCommand, option_file
from staticllm.cli.options import Number, flag, model_option, refuse, value
from staticllm.cli.progress import progress
from staticllm.config import StaticLLMConfig
from staticllm.pipelines.scheduling.policies import policy_names

if TYPE_CHECKING:
    from staticllm.pipelines.simulator.cluster import Scenario
    from staticllm.pipelines.simulator.simulated_device import DeviceModel
    from staticllm.pipelines.simulator.summary import Run, RunSummary, Summary
    from staticllm.pipelines.simulator.validate import Check
    from staticllm.pipelines.simulator.workload import Arrival

LOAD = 0.6
"""The default rate as a share of the maximum rate. Near the maximum, the queue depends more on arrivals than on the policy."""
COLUMNS = (
    ("requests/s", 11, ".3f", "requests_per_second"), ("tokens/s", 10, ".1f", "tokens_per_second"),
    ("TTFT ms", 11, ".1f", "ttft_ms"), ("p95", 11, ".1f", "ttft_p95_ms"), ("TPOT ms", 10, ".2f", "tpot_ms"),
    ("decoding", 10, ".2f", "decode_tpot_ms"), ("longest gap", 13, ".1f", "longest_gap_ms"), ("p95", 9, ".1f", "gap_p95_ms"),
    ("latency ms", 12, ".1f", "latency_ms"), ("fairness", 10, ".3f", "fairness"), ("busy", 7, ".1%", "busy"),
    ("jobs", 7, ".1%", "job_share"),
)  # fmt: skip
"""Head, width, format and field of ``RunSummary``; lines appear as policies end, so widths are fixed."""
HEADER = f"{'policy':<14}" + "".join(f"{name:>{width}}" for name, width, *_ in COLUMNS)
CHECK_HEADER = (
    f"{'policy':<14}{'lengths':>9}{'rate':>8}  {'tokens/s':>24}  {'TTFT ms':>24}  {'TPOT ms':>24}\n"
    f"{'costs':<31}" + f"  {'simulated measured':>24}" * 3
)
GROUPS = {
    "Targets": ("ttft_ms", "tpot_ms", "gap_ms"),
    "Comparisons": ("validate", "model", "device"),
    "Output": ("as_json", "plot", "save_costs"),
}
RARE = {
    "Costs of calls": (
        "costs", "blocks", "call_us", "programs", "weights_ms", "row_ms", "attention_us", "host_ms", "swap_us", "job_ms",
    ),
    "Limits": ("concurrency", "max_num_seqs", "kv_slots", "host_kv_slots"),
    "Answers and drafts": ("answers", "beams", "draft_tokens", "accept", "draft_ms"),
    "Several devices": ("devices", "disaggregate", "transfer_ms", "slot_bytes", "bandwidth", "dispatch"),
}  # fmt: skip


OF_REQUESTS = ("requests", "arrivals", "rate", "prompt", "output", "answers", "beams", "seed")
"""Options that make requests, which ``--trace`` reads."""
OF_COSTS = ("weights_ms", "row_ms", "attention_us", "programs")
"""Options of the formula that gives the costs without ``--costs``."""
OF_LINKS = ("transfer_ms", "slot_bytes", "bandwidth")
VALIDATED = {"policies", "requests", "rate", "seed", "model", "device", "as_json", "validate", "save_costs"}
"""The options that ``--validate`` reads; its workloads, costs and limits are those of the engine."""
POSITIVE = Number(0, 1e9, min_open=True)
COUNT = click.IntRange(1)


@click.command("simulate", cls=GroupedCommand, groups=GROUPS, rare=RARE)
@value("--policy policies", click.Choice(policy_names()), "May be repeated.  [dynamic, fcfs]", multiple=True)
@value("-n --requests", COUNT, "Number of requests.", 200)
@value(
    "--arrivals",
    click.Choice(["poisson", "uniform", "burst"]),
    "Arrival process; a burst arrives all at once.",
    "poisson",
)
@value("--disaggregate", None, "Use P devices that prefill and D that decode instead.", metavar="PxD")
@flag("--validate", "Compare with the engine, on this machine.")
@option_file
@model_option
@flag("--json as_json", "Print one JSON object.")
@value("--rate", POSITIVE, "Requests per second.  [60 % of the maximum rate]")
@value("--prompt", None, "Tokens per prompt: N, or LEAST-MOST.", "256")
@value("--output", None, "Tokens per answer: N, or LEAST-MOST.", "256")
@value("--answers", click.IntRange(1, 128), "Answers per request.", 1)
@value("--beams", click.IntRange(1, 64), "Beams per request instead.", 1)
@value("--draft-tokens", click.IntRange(1, 64), "Draft up to N tokens per request and call, where it pays.")
@value("--accept", Number(0, 1), "Probability that a drafted token is accepted.", 0.7)
@value("--draft-ms", click.FLOAT, "Draft model's ms per token; 0 for prompt lookup.", 0.0)
@value("--trace", click.Path(), "Read requests from a file instead, JSON lines or CSV: arrival, prompt, output, class.")
@value("--seed", click.IntRange(0), "Seed of arrivals and lengths.", 0)
@value("--devices", COUNT, "Devices that prefill and decode.", 1)
@value("--transfer-ms", click.FLOAT, "Latency from P to D, per request.", 0.0)
@value("--slot-bytes", click.FLOAT, "Bytes from P to D, per token.", 0.0)
@value("--bandwidth", POSITIVE, "Bandwidth from P to D, GB/s.", 10.0)
@value(
    "--dispatch",
    click.Choice(["least_loaded", "two_choices", "round_robin"]),
    "Which device takes a request.",
    "least_loaded",
)
@value("--concurrency", COUNT, "Most requests admitted at a time; others queue.")
@value("--max-num-seqs", COUNT, "Most requests running at a time.  [as the pipeline]")
@value("--kv-slots", COUNT, "KV slots of the arena.  [as the pipeline]")
@value("--host-kv-slots", click.IntRange(0), "KV slots of the host pool.  [as the pipeline]")
@value("--ttft-ms", POSITIVE, "Target for the time to first token.")
@value("--tpot-ms", POSITIVE, "Target for the time between two tokens.")
@value(
    "--gap-ms",
    POSITIVE,
    "Longest wait of a request that has begun for a place among the running ones.",
    StaticLLMConfig.gap_ms,
)
@value("--programs", click.Choice(["shared", "separate"]), "Which programs the device has, without --costs.", "shared")
@value(
    "--costs",
    click.Path(),
    "Read costs from a file, JSON: rows, kv_len, sequences, seconds; or npu-4000 or npu-4000-int4: a 0.5B model in blocks on an "
    "NPU, by its compiler's schedule.",
)
@value("--blocks", COUNT, "Blocks per call, between which decode steps run.  [24 for npu-4000, else 1]")
@value("--call-us", click.FLOAT, "With --costs npu-4000: assumed us of host and driver per block.", 20.0)
@value("--weights-ms", click.FLOAT, "Without --costs: ms per call,", 20.0)
@value("--row-ms", click.FLOAT, "plus ms per row,", 0.5)
@value("--attention-us", click.FLOAT, "plus us per row and slot that it sees.", 0.05)
@value("--host-ms", click.FLOAT, "Host time between two calls.", 0.0)
@value("--swap-us", click.FLOAT, "Host time per KV slot that is swapped.", 0.0)
@value(
    "--job-ms",
    Number(0, 1e6, min_open=True),
    "Calls of another model, such as documents to embed, that always wait on each device: ms per call.",
)
@value("--save-costs", click.Path(), "Write the costs to a file; with --validate, the measured ones.")
@value("--device", None, "Device for --validate.", "CPU")
@value("--plot", click.Path(), "Plot the runs to a file: PNG, SVG, PDF.")
def command(**options: Any) -> None:
    """Run scheduling policies, the same objects as in the engine, on a virtual clock with given costs per call.

    The model is loaded only for --validate; otherwise --costs, or --weights-ms and the options after it, set the costs.
    """
    if options["plot"] and options["validate"]:
        raise click.UsageError("--plot draws simulated runs: leave out --validate")
    _check_ignored(options)
    options["policies"] = list(dict.fromkeys(options["policies"])) or ["dynamic", "fcfs"]
    if options["validate"]:
        _validate(options)
    else:
        _simulate(options)


def _check_ignored(options: dict[str, Any]) -> None:
    """Raise a ``UsageError`` if an option was given that another one leaves without an effect."""
    if options["validate"]:
        known = {str(each.name) for each in click.get_current_context().command.params}
        refuse(known - VALIDATED, "is for simulated runs, and --validate compares the engine's own")
        return
    refuse(("model", "device"), "is for --validate")
    if options["trace"]:
        refuse(OF_REQUESTS, "is for requests that are drawn, and --trace reads them")
    elif options["arrivals"] == "burst":
        refuse(("rate",), "is for arrivals one after another, and a burst arrives at once")
    if options["costs"]:
        refuse(OF_COSTS, "is for runs without --costs")
    if not (options["costs"] or "").startswith("npu-"):
        refuse(("call_us",), "is for --costs npu-4000 and npu-4000-int4")
    if options["draft_tokens"] is None:
        refuse(("accept", "draft_ms"), "is for --draft-tokens")
    if not options["disaggregate"]:
        refuse(OF_LINKS, "is for --disaggregate")


def _simulate(options: dict[str, Any]) -> None:
    from staticllm.pipelines.simulator.cost_model import write_costs
    from staticllm.pipelines.simulator.plot import check_plot, plot_runs
    from staticllm.pipelines.simulator.summary import summarize_classes, summarize_run

    if options["plot"]:
        check_plot(options["plot"])
    with progress("simulating"):
        scenario = _scenario(options)
        if options["save_costs"]:
            write_costs(options["save_costs"], scenario.model.index.variants, scenario.model.cost)
    runs: dict[str, Run] = {}
    results: dict[str, RunSummary] = {}
    classes: dict[str, dict[str, RunSummary]] = {}
    if not options["as_json"]:
        click.echo(HEADER)
    with progress("simulating") as shown:
        if options["job_ms"] is not None:
            scenario = scenario.with_jobs(options["job_ms"] / 1e3)
        for number, policy in enumerate(options["policies"]):
            shown.show(f"simulating {policy}", number, len(options["policies"]))
            runs[policy] = scenario.run(policy)
            results[policy] = summarize_run(runs[policy])
            classes[policy] = summarize_classes(runs[policy])
            if not options["as_json"]:
                lines = {policy: results[policy], **{f"  {name}": each for name, each in classes[policy].items()}}
                shown.write("\n".join(_line(name, summary) for name, summary in lines.items()))
    if options["as_json"]:
        click.echo(json.dumps({policy: _told(found, classes[policy]) for policy, found in results.items()}, indent=2))
    if options["plot"]:
        plot_runs(runs, options["plot"])


def _told(summary: RunSummary, classes: dict[str, RunSummary]) -> dict[str, Any]:
    """Return the figures of a policy as JSON types, with those of both classes of work if there are both."""
    shown = {name: each.as_dict() for name, each in classes.items()}
    return {**summary.as_dict(), **({"classes": shown} if shown else {})}


def _line(policy: str, summary: RunSummary) -> str:
    line = f"{policy:<14}" + "".join(f"{getattr(summary, name):>{width}{form}}" for _, width, form, name in COLUMNS)
    drafts = f"\n{'':<14}{summary.num_accepted} of {summary.num_drafted} drafted tokens accepted"
    return line + drafts if summary.num_drafted else line


def _scenario(options: dict[str, Any]) -> Scenario:
    """Return the devices and the requests, at the given rate or else at ``LOAD`` of the devices' maximum rate.

    A rate above the maximum gives a warning on stderr: the queue then grows until the last request arrives, and the latencies
    measure the length of the queue, not the quality of the policy.
    """
    from staticllm.pipelines.simulator.cluster import Link, Scenario, max_rate, offered_rate

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
    count = options["requests"]
    seed = options["seed"]
    if options["arrivals"] == "burst":
        found = workload.burst(count, lengths, seed)
    else:
        found = (workload.poisson if options["arrivals"] == "poisson" else workload.uniform)(rate, count, lengths, seed)
    size = max(options["answers"], options["beams"])
    return [replace(arrival, num_answers=size, are_beams=options["beams"] > 1) for arrival in found]


def _model(options: dict[str, Any], arrivals: list[Arrival]) -> DeviceModel:
    from staticllm.pipelines.programs.variant_index import VariantIndex
    from staticllm.pipelines.simulator.cluster import configured_model, longest, npu_model, tabled_model
    from staticllm.pipelines.simulator.cost_model import AnalyticCosts, Blocks, HostCost, read_costs
    from staticllm.pipelines.simulator.npu_costs import NPU_COSTS
    from staticllm.pipelines.simulator.simulated_programs import Drafting

    for name in (
        "weights_ms",
        "row_ms",
        "attention_us",
        "host_ms",
        "swap_us",
        "call_us",
        "transfer_ms",
        "slot_bytes",
        "draft_ms",
    ):
        if not 0 <= options[name] < float("inf"):
            raise click.UsageError(f"--{name.replace('_', '-')} {options[name]:g}: must be 0 or more")
    prompt, output = longest(arrivals)
    names = ("max_num_seqs", "kv_slots", "host_kv_slots", "ttft_ms", "tpot_ms", "gap_ms")
    config = StaticLLMConfig(max_prompt_len=prompt, min_response_len=output, **{name: options[name] for name in names})
    host = HostCost(options["host_ms"] / 1e3, swap=options["swap_us"] / 1e6)
    blocks = Blocks(options["blocks"] or 1)
    if options["costs"] in NPU_COSTS:
        costs = replace(NPU_COSTS[options["costs"]], call_seconds=options["call_us"] / 1e6)
        costs = replace(costs, num_blocks=options["blocks"] or costs.num_blocks)
        model = npu_model(config, costs, host)
        blocks = costs.divided
    elif options["costs"]:
        variants, table = read_costs(options["costs"])
        model = tabled_model(config, VariantIndex(variants), table, host)
    else:
        mode: Literal["shared", "separate"] = options["programs"]
        cost = AnalyticCosts(options["weights_ms"] / 1e3, options["row_ms"] / 1e3, options["attention_us"] / 1e6)
        model = configured_model(config, mode, cost, host)
    has_beams = any(arrival.are_beams for arrival in arrivals)
    num_drafts = options["draft_tokens"]
    drafting = None if num_drafts is None else Drafting(num_drafts, options["accept"], options["draft_ms"] / 1e3)
    return replace(model, drafting=drafting, prefix_caching=has_beams, blocks=blocks)


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


def _validate(options: dict[str, Any]) -> None:
    """Print the deviations of the simulator from the engine (``--validate``), and write the costs for ``--save-costs``.

    Raises:
        StaticLLMError: the model cannot be loaded or run.
        ConfigError: the costs cannot be written.
    """
    from staticllm.pipelines.simulator.cost_model import write_costs
    from staticllm.pipelines.simulator.validate import WORKLOADS, validate

    checks: list[Check] = []
    model: DeviceModel | None = None
    if not options["as_json"]:
        click.echo(CHECK_HEADER)
    total = len(options["policies"]) * len(WORKLOADS)
    with progress("loading the model, and measuring its costs") as shown:
        arguments = (options[name] for name in ("model", "device", "policies", "requests", "rate", "seed"))
        for check, calibrated in validate(*arguments):
            checks.append(check)
            model = calibrated
            if not options["as_json"]:
                shown.write(_check_lines(check))
            shown.show("serving workloads", len(checks), total)
    if options["save_costs"] and model is not None:
        write_costs(options["save_costs"], model.index.variants, model.cost)
    if options["as_json"]:
        click.echo(json.dumps([{**asdict(check), "deviations": check.deviations} for check in checks], indent=2))


def _check_lines(check: Check) -> str:
    """Return two lines: simulated with the costs measured before the run, then with those of the run itself."""
    head = f"{check.policy:<14}{f'{check.prompt}/{check.output}':>9}{check.rate:>8.2f}"
    before = f"{head}{_check_cells(check.predicted, check.measured)}"
    return f"{before}\n{'  of the run itself':<31}{_check_cells(check.replayed, check.measured)}"


def _check_cells(simulated: Summary, measured: Summary) -> str:
    from staticllm.pipelines.simulator.validate import deviations

    return "".join(
        f"  {getattr(simulated, name):>8.1f} {getattr(measured, name):>8.1f} {deviation:>+5.1f}%"
        for name, deviation in deviations(simulated, measured).items()
    )
