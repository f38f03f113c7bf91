"""The options of `staticllm serve` for many machines, on a cluster of Ray."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from staticllm.cli.options import read_properties
from staticllm.errors import ConfigError

Command = TypeVar("Command", bound=Callable[..., Any])
ONE_MACHINE = (
    "max_waiting", "max_per_client", "memory_limit_mb", "idle_unload", "lazy",
    "header_seconds", "body_seconds", "send_seconds", "max_connections",
    "supervise", "daemon", "random_key", "ready_fd", "ready_file", "parent_pid", "access_log", "otel",
)  # fmt: skip
"""Options of a server of one machine: a cluster decides about the first ones by replicas, and belongs to no application."""


def cluster_options(command: Command) -> Command:
    """Add the options of a cluster to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


class Replicas(click.ParamType):  # type: ignore[type-arg]  # click 8.1 has none
    """A number of replicas, or bounds of it: ``2``, ``1:4``."""

    name = "N|MIN:MAX"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        low, _, high = str(value).partition(":")
        if not (low.isdecimal() and (not high or high.isdecimal())):
            self.fail(f"{value!r} is not a number of replicas: give 2, or 1:4", param, ctx)
        return int(low), int(high or low)


_OPTIONS = (
    click.option("--ray", is_flag=True, help="Serve on the machines of a Ray cluster; see docs/cluster.md."),
    click.option(
        "--ray-address", metavar="ADDRESS", help="The cluster; auto for this machine's.  [this machine alone]"
    ),
    click.option("--replicas", type=Replicas(), help="Replicas of each kind of model.  [1]"),
    click.option("--target-requests", type=float, help="Requests of a replica above which another one is added.  [8]"),
    click.option("--models-per-replica", type=click.IntRange(1), help="Models that a replica keeps loaded.  [2]"),
)


def check_cluster_options(options: dict[str, Any]) -> None:
    """Check that the options of a cluster come with ``--ray``.

    Raises:
        ConfigError: one comes without it.
    """
    for name in ("ray_address", "replicas", "target_requests", "models_per_replica"):
        if not options["ray"] and options[name] is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is for a cluster: give --ray too")


def serve_on_ray(models: tuple[str, ...], keys: tuple[str, ...], options: dict[str, Any]) -> None:
    """Serve on a cluster until a signal ends it.

    Raises:
        ConfigError: Ray is not installed, the cluster is not there, or the options are not those of a cluster.
        StaticLLMError: a model is missing.
    """
    try:
        from staticllm.server.ray_app.run import serve_on_cluster, settings_of
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'staticllm[server,cluster]'") from None
    context = click.get_current_context()
    for name in ONE_MACHINE:
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
            raise ConfigError(f"--{name.replace('_', '-')} is for one machine: leave it out with --ray")
    low, high = options["replicas"] or (1, 1)
    given = {name: options[name] for name in ("target_requests", "models_per_replica") if options[name] is not None}
    settings = settings_of(
        {
            **given,
            "models": models,
            "device": options["device"],
            "properties": read_properties(options),
            "api_keys": keys,
            "host": options["host"],
            "is_insecure": options["insecure"],
            "allowed_origins": options["allowed_origins"],
            "min_replicas": low,
            "max_replicas": high,
            "max_replicas_per_node": 1 if options["ray_address"] else high,
            "grace": options["grace"],
            "max_body": options["max_body_mb"] << 20,
        }
    )
    names = ", ".join(spec.name for spec in settings.specs())
    serve_on_cluster(settings, options["ray_address"], options["port"], lambda url: click.echo(f"{url}/v1  {names}"))
