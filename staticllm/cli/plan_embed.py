"""``staticllm plan --embed``: how many machines embed a load within a latency limit, or with ``--measured`` the queue depths.

The machines follow from the depths (WINDVE's cost model).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.core import ParameterSource

from staticllm.cli.options import Number, with_properties
from staticllm.cli.progress import progress
from staticllm.errors import ConfigError

if TYPE_CHECKING:
    from staticllm.pipelines.embedding.windve.deployment_cost import DeploymentCost

Command = TypeVar("Command", bound=Callable[..., Any])
_LOAD = Number(0, 1e12, min_open=True)
_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--embed", {"is_flag": True, "help": "Estimate the machines that embed a load instead, without MODEL."}),
    ("--depths", {"metavar": "MAIN,CPU",
                  "help": "With --embed: queries at once within the limit, without and by the CPU."}),
    ("--estimates", {"type": click.Path(),
                     "help": "With --embed: a file of queue depths, the main device first; --measured writes it."}),
    ("--limit-s", {"type": Number(0, 1e6, min_open=True), "help": "With --embed: latency limit, s.  [1]"}),
    ("--peak", {"type": _LOAD, "help": "With --embed: queries at once at the peak."}),
    ("--average", {"type": _LOAD, "help": "With --embed: queries per second, on average."}),
    ("--price", {"type": Number(0, 1e9), "help": "With --embed: price of one machine per hour."}),
)  # fmt: skip
_NAMES = tuple(name.removeprefix("--").replace("-", "_") for name, _ in _OPTIONS)
EMBED_GROUP = {"Machines that embed a load": _NAMES}
"""The group of these options in the help."""


def embed_options(command: Command) -> Command:
    """Add ``--embed`` and its options to ``staticllm plan``; with ``--embed`` the command itself does not run."""

    @wraps(command)
    def with_embed(*arguments: Any, **options: Any) -> Any:
        own = {name: options.pop(name) for name in _NAMES}
        if not own["embed"]:
            given = [f"--{name.replace('_', '-')}" for name in _NAMES[1:] if own[name] is not None]
            if given:
                raise click.UsageError(f"{given[0]} is an option of --embed: add --embed")
            return command(*arguments, **options)
        if options["measured"]:
            _check_alone("model", "named", "measured", "device", "precision", "properties")
            return _measure(own, options)
        _check_alone()
        return _plan(own, options["as_json"])

    decorated: Any = with_embed
    for name, settings in reversed(_OPTIONS):
        decorated = click.option(name, **settings)(decorated)
    return cast(Command, decorated)


def _check_alone(*known: str) -> None:
    """Refuse options that were given with ``--embed`` but would be ignored; ``known`` are not."""
    context = click.get_current_context()
    for parameter in context.command.params:
        is_given = context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        if is_given and parameter.name not in (*_NAMES, "as_json", *known):
            named = parameter.opts[-1] if isinstance(parameter, click.Option) else "MODEL"
            raise click.UsageError(f"{named} has no meaning with --embed: leave one of them out")


def _measure(own: dict[str, Any], options: dict[str, Any]) -> None:
    """Measure the queue depths of a model on ``--device``, such as ``NPU,CPU``, and write them to ``--estimates``, if given."""
    from staticllm.pipelines.embedding.pool.pool_loader import measure_model

    for name in ("depths", "peak", "average", "price"):
        if own[name] is not None:
            raise click.UsageError(f"--{name} has no meaning with --measured: leave one of them out")
    if options["model"] is None:
        raise click.UsageError("--embed --measured: give the directory of the encoder whose queues are measured")
    names = {"precision": "INFERENCE_PRECISION_HINT"}
    given = {name: options[key] for key, name in names.items() if options[key]}
    properties = with_properties(given, names, options["properties"])
    path = None if own["estimates"] is None else Path(own["estimates"])
    limit_s = own["limit_s"] or 1.0
    with progress("loading the model") as shown:
        found = measure_model(Path(options["model"]), options["device"], properties, limit_s, path, shown.show)
    if options["as_json"]:
        click.echo(json.dumps([asdict(device) for device in found], indent=2))
        return
    click.echo(f"queue depths within {limit_s:g} s")
    for device in found:
        line = device.estimate.line
        click.echo(
            f"{device.estimate.name:<10} regression {device.regression:>5}, stress test {device.stress:>5}, fine-tuned "
            f"{device.tuned:>5}   alpha {line.alpha * 1e3:.2f} ms, beta {line.beta * 1e3:.2f} ms, r2 {device.estimate.r2:.4f}"
        )


def _plan(options: dict[str, Any], as_json: bool) -> None:
    """Print the machines for each kind of load; a kind without machines is null in JSON, and its reason goes to stderr.

    Raises:
        ConfigError: no kind of load has machines.
    """
    if options["peak"] is None and options["average"] is None:
        raise click.UsageError("--embed: give the load, --peak or --average or both")
    if (options["depths"] is None) == (options["estimates"] is None):
        raise click.UsageError("--embed: give either --depths or --estimates")
    found = _costs(options)
    possible = {name: cost for name, cost in found.items() if not isinstance(cost, ConfigError)}
    errors = {name: cost for name, cost in found.items() if isinstance(cost, ConfigError)}
    if not possible:
        raise next(iter(errors.values()))
    if options["average"] is not None:  # other arrivals need more machines
        evenly = "evenly: queries that arrive evenly, so that one may wait for a whole batch"
        without = (
            "queries that arrive evenly need more machines: --estimates, with the lines of the devices, says how many"
        )
        what = "average: queries that come only after the last are answered (equation 5)"
        click.echo(f"{what}; {evenly if 'evenly' in found else without}", err=True)
    if as_json:
        values = {name: asdict(possible[name]) if name in possible else None for name in found}
        click.echo(json.dumps(values, indent=2))
    else:
        click.echo("\n".join(line for name, cost in possible.items() for line in _lines(name, cost, options["price"])))
    for name, error in errors.items():
        click.echo(f"{name}: {error}", err=True)


@dataclass(frozen=True)
class _Device:
    """A device by its queue depth within the limit."""

    depth: int
    limit_s: float
    sustained_rate: float | None = None
    """Needs its line, which ``--depths`` does not give."""

    @property
    def lockstep_rate(self) -> float:
        """Queries per second if the next ones come only after the last are answered: the rate of equation 5."""
        return self.depth / self.limit_s


def _costs(options: dict[str, Any]) -> dict[str, DeploymentCost | ConfigError]:
    """Return the machines for each kind of load that was given, or why there are none."""
    from staticllm.pipelines.embedding.windve.deployment_cost import average_cost, peak_cost

    main, *helping = _devices(options)
    peak = options["peak"]
    average = options["average"]
    price = options["price"] or 0.0

    def tried(cost: Callable[..., DeploymentCost], *arguments: float) -> DeploymentCost | ConfigError:
        try:
            return cost(*arguments, price)
        except ConfigError as error:
            return error

    found: dict[str, DeploymentCost | ConfigError] = {}
    if peak is not None:
        found["peak"] = tried(peak_cost, peak, main.depth, sum(each.depth for each in helping))
    if average is not None:
        rate = sum(each.lockstep_rate for each in helping)
        found["average"] = tried(average_cost, average, main.lockstep_rate, rate)
        even = [each.sustained_rate for each in (main, *helping)]
        if None not in even:
            first, *others = (each or 0.0 for each in even)
            found["evenly"] = tried(average_cost, average, first, sum(others))
    return found


def _devices(options: dict[str, Any]) -> list[_Device]:
    """Return the main device, and those that help.

    Raises:
        UsageError: ``--depths`` is not two whole numbers.
        ConfigError: the file of ``--estimates`` has no device.
    """
    from staticllm.pipelines.embedding.windve.queue_depth import read_estimates

    depths = options["depths"]
    path = options["estimates"]
    limit_s = options["limit_s"]
    if depths is not None:
        match = re.fullmatch(r"(\d{1,6}),(\d{1,6})", depths, re.ASCII)
        if not match:
            raise click.UsageError(f"--depths {depths!r}: must be two whole numbers, for example 96,22")
        return [_Device(int(depth), limit_s or 1.0) for depth in match.groups()]
    found = read_estimates(path)
    if not found:
        raise ConfigError(f"{path}: there is no such file, or it holds no device: give one with queue depths")
    lines = found if limit_s is None else [each.for_limit(limit_s) for each in found]
    return [_Device(each.depth, each.limit_s, each.sustained_rate) for each in lines]


def _lines(name: str, cost: DeploymentCost, price: float | None) -> list[str]:
    lines = []
    for label, machines in (("main device alone", cost.alone), ("with the CPU", cost.together)):
        per_hour = "" if price is None else f", {machines.price:.2f} per hour"
        lines.append(f"{name:<8} {label:<18} {machines.exact:>10.1f} machines, {machines.whole} whole{per_hour}")
    return [*lines, f"{name:<8} saving {cost.saving:.1%}"]
