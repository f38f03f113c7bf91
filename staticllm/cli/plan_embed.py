"""``staticllm plan --embed`` estimates how many machines embed a load within a latency limit, and what their CPUs save.

With ``--measured`` it measures the queue depths of a model instead, by which it estimates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.core import ParameterSource

from staticllm.cli.options import Number
from staticllm.cli.progress import progress
from staticllm.errors import ConfigError

if TYPE_CHECKING:
    from staticllm.pipelines.embedding.windve.deployment_cost import DeploymentCost
    from staticllm.pipelines.embedding.windve.queue_depth import Estimate

Command = TypeVar("Command", bound=Callable[..., Any])
_NAMES = ("embed", "depths", "estimates", "limit_s", "peak", "average", "price")
EMBED_GROUP = {"Machines that embed a load": _NAMES}
"""The group of these options in the help."""


def embed_options(command: Command) -> Command:
    """Add ``--embed`` and its options to ``staticllm plan``; with ``--embed`` the command itself does not run."""

    @wraps(command)
    def with_embed(*arguments: Any, **options: Any) -> Any:
        own = {name: options.pop(name) for name in _NAMES}
        if own["embed"] and options["measured"]:
            _check_alone("model", "named", "measured", "device", "precision", "properties")
            return _measure(own, options)
        if own["embed"]:
            _check_alone()
            return _plan(own, options["as_json"])
        given = [f"--{name.replace('_', '-')}" for name in _NAMES[1:] if own[name] is not None]
        if given:
            raise click.UsageError(f"{given[0]} is an option of --embed: add --embed")
        return command(*arguments, **options)

    decorated: Any = with_embed
    for option in reversed(
        [
            click.option(
                "--embed", is_flag=True, help="Estimate the machines that embed a load instead, without MODEL."
            ),
            click.option(
                "--depths",
                metavar="MAIN,CPU",
                help="With --embed: queries at once within the limit, without and by the CPU.",
            ),
            click.option(
                "--estimates",
                type=click.Path(),
                help="With --embed: a file of queue depths, the main device first; --measured writes it.",
            ),
            click.option("--limit-s", type=Number(0, 1e6, min_open=True), help="With --embed: latency limit, s.  [1]"),
            click.option(
                "--peak", type=Number(0, 1e12, min_open=True), help="With --embed: queries at once at the peak."
            ),
            click.option(
                "--average", type=Number(0, 1e12, min_open=True), help="With --embed: queries per second, on average."
            ),
            click.option("--price", type=Number(0, 1e9), help="With --embed: price of one machine per hour."),
        ]
    ):
        decorated = option(decorated)
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
    from pathlib import Path

    from staticllm.pipelines.embedding.pool.pool_loader import measure_model

    for name in ("depths", "peak", "average", "price"):
        if own[name] is not None:
            raise click.UsageError(f"--{name} has no meaning with --measured: leave one of them out")
    if options["model"] is None:
        raise click.UsageError("--embed --measured: give the directory of the encoder whose queues are measured")
    properties: dict[str, object] = dict(options["properties"])
    if options["precision"]:
        properties["INFERENCE_PRECISION_HINT"] = options["precision"]
    path = None if own["estimates"] is None else Path(own["estimates"])
    with progress("loading the model") as shown:
        found = measure_model(
            Path(options["model"]), options["device"], properties, own["limit_s"] or 1.0, path, shown.show
        )
    if options["as_json"]:
        click.echo(json.dumps([asdict(device) for device in found], indent=2))
        return
    click.echo(f"queue depths within {own['limit_s'] or 1.0:g} s")
    for device in found:
        line = device.estimate.line
        click.echo(
            f"{device.estimate.name:<10} regression {device.regression:>5}, stress test {device.stress:>5}, fine-tuned "
            f"{device.tuned:>5}   alpha {line.alpha * 1e3:.2f} ms, beta {line.beta * 1e3:.2f} ms, r2 {device.estimate.r2:.4f}"
        )


def _plan(options: dict[str, Any], as_json: bool) -> None:
    from staticllm.pipelines.embedding.windve.deployment_cost import average_cost, peak_cost

    if options["peak"] is None and options["average"] is None:
        raise click.UsageError("--embed: give the load, --peak or --average or both")
    if (options["depths"] is None) == (options["estimates"] is None):
        raise click.UsageError("--embed: give either --depths or --estimates")
    main, *helping = _devices(options)
    price = options["price"] or 0.0
    found: dict[str, DeploymentCost | ConfigError] = {}
    if options["peak"] is not None:
        found["peak"] = _or_error(peak_cost, options["peak"], main.depth, sum(each.depth for each in helping), price)
    if options["average"] is not None:
        rates = main.lockstep_rate, sum(each.lockstep_rate for each in helping)
        found["average"] = _or_error(average_cost, options["average"], *rates, price)
        even = [each.sustained_rate for each in (main, *helping)]
        if None not in even:
            first, *others = (rate or 0.0 for rate in even)
            found["evenly"] = _or_error(average_cost, options["average"], first, sum(others), price)
    _show(found, options, as_json)


def _or_error(cost: Callable[..., DeploymentCost], *arguments: float) -> DeploymentCost | ConfigError:
    """Return the machines for one kind of load, or why there are none: the other kinds have machines nevertheless."""
    try:
        return cost(*arguments)
    except ConfigError as error:
        return error


def _show(found: dict[str, DeploymentCost | ConfigError], options: dict[str, Any], as_json: bool) -> None:
    """Print a row, or the key of a JSON object, for each kind of load; one without machines is null, its reason on stderr.

    Raises:
        ConfigError: no kind of load has machines.
    """
    possible = {name: cost for name, cost in found.items() if not isinstance(cost, ConfigError)}
    errors = {name: cost for name, cost in found.items() if isinstance(cost, ConfigError)}
    if not possible:
        raise next(iter(errors.values()))
    _explain(found, options["average"] is not None)
    if as_json:
        values = {name: asdict(possible[name]) if name in possible else None for name in found}
        click.echo(json.dumps(values, indent=2))
    for name, cost in () if as_json else possible.items():
        click.echo(_text(name, cost, options["price"] is not None))
    for name, error in errors.items():
        click.echo(f"{name}: {error}", err=True)


@dataclass(frozen=True)
class _Device:
    """A device by its queue depth within the limit. ``sustained_rate`` needs its line, which ``--depths`` does not give."""

    depth: int
    limit_s: float
    sustained_rate: float | None = None

    @property
    def lockstep_rate(self) -> float:
        """Queries per second if the next ones come only after the last are answered: the rate of equation 5."""
        return self.depth / self.limit_s


def _explain(found: Mapping[str, object], has_average: bool) -> None:
    """Say on stderr which arrivals the machines of an average load are for, because others need more."""
    if not has_average:
        return
    what = "average: queries that come only after the last are answered (equation 5)"
    evenly = "evenly: queries that arrive evenly, so that one may wait for a whole batch"
    without = "queries that arrive evenly need more machines: --estimates, with the lines of the devices, says how many"
    click.echo(f"{what}; {evenly if 'evenly' in found else without}", err=True)


def _devices(options: dict[str, Any]) -> list[_Device]:
    """Return the main device, and those that help."""
    if options["depths"] is not None:
        match = re.fullmatch(r"(\d{1,6}),(\d{1,6})", options["depths"], re.ASCII)
        if not match:
            raise click.UsageError(f"--depths {options['depths']!r}: must be two whole numbers, for example 96,22")
        return [_Device(int(depth), options["limit_s"] or 1.0) for depth in match.groups()]
    return [_Device(e.depth, e.limit_s, e.sustained_rate) for e in _read(options["estimates"], options["limit_s"])]


def _read(path: str, limit_s: float | None) -> tuple[Estimate, ...]:
    from staticllm.pipelines.embedding.windve.queue_depth import read_estimates

    found = read_estimates(path)
    if not found:
        raise ConfigError(f"{path}: there is no such file, or it holds no device: give one with queue depths")
    return found if limit_s is None else tuple(each.for_limit(limit_s) for each in found)


def _text(name: str, cost: DeploymentCost, has_price: bool) -> str:
    lines = []
    for label, machines in (("main device alone", cost.alone), ("with the CPU", cost.together)):
        price = f", {machines.price:.2f} per hour" if has_price else ""
        lines.append(f"{name:<8} {label:<18} {machines.exact:>10.1f} machines, {machines.whole} whole{price}")
    return "\n".join([*lines, f"{name:<8} saving {cost.saving:.1%}"])
