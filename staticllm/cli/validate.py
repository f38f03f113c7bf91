"""Compares the simulator with the engine on this machine, for ``staticllm simulate --validate``."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from staticllm.cli.progress import progress

if TYPE_CHECKING:
    from staticllm.pipelines.simulator.simulated_device import DeviceModel
    from staticllm.pipelines.simulator.summary import Summary
    from staticllm.pipelines.simulator.validate import Check

CHECK_HEADER = (
    f"{'policy':<14}{'lengths':>9}{'rate':>8}  {'tokens/s':>24}  {'TTFT ms':>24}  {'TPOT ms':>24}\n"
    f"{'costs':<31}" + f"  {'simulated measured':>24}" * 3
)


def compare_with_engine(options: dict[str, Any]) -> None:
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
