"""`staticllm serve` answers OpenAI's API over HTTP, with the models of this machine or of a cluster of Ray."""

from __future__ import annotations

import logging
import os
import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from staticllm.cli.grouped_command import GroupedCommand, option_file
from staticllm.cli.options import PROGRAM_GROUP, Number, flag, layout_options, options_of, read_properties, value
from staticllm.cli.pulling import brought
from staticllm.errors import ConfigError, quoted
from staticllm.model_paths.arguments import expanded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from staticllm.server.config_file import ServerConfig
    from staticllm.server.models.served import ModelSpec
    from staticllm.server.settings import ServerSettings

KEY_VARIABLE = "STATICLLM_API_KEY"
ONE_MACHINE = (
    "max_waiting", "max_per_client", "memory_limit_mb", "idle_unload", "lazy",
    "max_upload_mb", "max_audio_minutes", "header_seconds", "body_seconds", "send_seconds", "max_connections",
    "supervise", "daemon", "random_key", "ready_fd", "ready_file", "parent_pid", "access_log", "otel", "config",
)  # fmt: skip
"""Options of a server of one machine: a cluster decides about the first ones by replicas, and belongs to no application."""
AS_GIVEN = (
    "host", "port", "allowed_origins", "device", "max_waiting", "max_per_client", "idle_unload", "grace", "header_seconds",
    "body_seconds", "send_seconds", "max_connections", "access_log",
)  # fmt: skip
"""Options that are settings of the server by the same name."""
GROUPS = {
    "Access": ("api_keys", "api_key_file", "insecure", "allowed_origins"),
    "Load and memory": (
        "max_waiting", "max_per_client", "memory_limit_mb", "idle_unload", "lazy", "supervise", "daemon", "grace",
    ),
}  # fmt: skip
RARE = {
    **PROGRAM_GROUP,
    "Connections": (
        "max_body_mb",
        "max_upload_mb",
        "max_audio_minutes",
        "header_seconds",
        "body_seconds",
        "send_seconds",
        "max_connections",
    ),
    "Logs": ("access_log", "otel"),
    "Part of an application": ("random_key", "ready_fd", "ready_file", "parent_pid"),
    "Many machines": ("ray", "ray_address", "replicas", "target_requests", "models_per_replica"),
}


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


cluster_options = options_of(
    flag("--ray", "Serve on the machines of a Ray cluster; see docs/server.md."),
    value("--ray-address", None, "The cluster; auto for this machine's.  [this machine alone]", metavar="ADDRESS"),
    value("--replicas", Replicas(), "Replicas of each kind of model.  [1]"),
    value("--target-requests", float, "Requests of a replica above which another one is added.  [8]"),
    value("--models-per-replica", click.IntRange(1), "Models that a replica keeps loaded.  [2]"),
)


class _PortInUse(click.ClickException):
    """Another process has the port."""

    exit_code = 3


@click.command("serve", cls=GroupedCommand, groups=GROUPS, rare=RARE)
@click.argument("models", nargs=-1, metavar="[[NAME=]PATH]...")
@value("--host", None, "Address to listen at.", "127.0.0.1")
@value("--port", click.IntRange(0, 65535), "0 lets the system choose.", 8000)
@value("--api-key api_keys", None, f"A key that clients must send; may be repeated.  [${KEY_VARIABLE}]", multiple=True)
@value("--api-key-file", click.Path(dir_okay=False), "A file with one key per line.")
@flag("--insecure", "Let other machines connect without a key.")
@value("--allowed-origins", None, "Web pages that may send requests; * for all.", metavar="ORIGIN", multiple=True)
@value("--max-waiting", click.IntRange(1), "Requests that wait per model.", 64)
@value("--max-per-client", click.IntRange(1), "Answers of one client at once.  [3/4, or all if it is alone]")
@value("--memory-limit-mb", click.IntRange(1), "Memory of all loaded models together, by estimate.")
@value("--idle-unload", Number(0.1), "Unload models that were not used for this long.", metavar="SECONDS")
@flag("--lazy", "Load the first model by its first request, too.")
@value("--grace", Number(0), "Seconds for running answers at the end.", 10.0)
@value("--max-body-mb", click.IntRange(1, 1024), "Largest request.", 16)
@value("--max-upload-mb", click.IntRange(1, 1024), "Largest recording.", 25)
@value("--max-audio-minutes", Number(0.1, 480), "Longest recording.", 60.0)
@value("--header-seconds", Number(0.1), "Time for the headers of a request.", 10.0)
@value("--body-seconds", Number(0.1), "Time for its body.", 60.0)
@value("--send-seconds", Number(0.1), "Close the connection of a client that takes nothing for so long.", 120.0)
@value("--max-connections", click.IntRange(1), "Connections at once.", 1024)
@value("--access-log", None, "Write a line of JSON per request to FILE; - for standard error.", metavar="FILE")
@flag("--otel", "Send spans of OpenTelemetry, to where its own variables (OTEL_…) say.")
@flag("--supervise", "Run each model in a process of its own, which is started again after a crash.")
@flag("--daemon", "Run chat and speech models in your daemon, which other programs share.")
@flag("--random-key", "Make a key that only the ready file or descriptor tells.")
@value(
    "--ready-fd",
    click.IntRange(1),
    "Write URL, port, key and pid as JSON to this file descriptor once it serves.",
    metavar="N",
)
@value("--ready-file", click.Path(), "Write them to this file, which only you can read, until the end.")
@value("--parent-pid", click.IntRange(1), "End when this process ends.", metavar="PID")
@value(
    "--config",
    click.Path(dir_okay=False),
    "A TOML file with models and their options; see docs/server.md.",
    metavar="FILE",
)
@cluster_options
@option_file
@layout_options
def command(models: tuple[str, ...], **options: Any) -> None:
    """Serve MODELS, directories of chat models, embedders, rerankers and speech models, by name. Without any, the
    embedded model is served.

    A PATH may be a GGUF file or a name on Hugging Face, which is downloaded once. -p NAME=VALUE is for all models that know
    the option, -p MODEL:NAME=VALUE for one.

    Each model is loaded by its first request, the first one at once. Clients use http://127.0.0.1:8000/v1 and any key. A
    signal to end (SIGTERM, Ctrl-C) refuses new requests and finishes running ones within --grace.

    Exit codes: 0 ended as asked, 1 an error, 2 wrong usage, 3 another process has the port.
    """
    check_cluster_options(options)
    if options["ray"]:
        serve_on_ray(models, _keys(options["api_keys"], options["api_key_file"]), options)
        return
    try:
        from staticllm.server.config_file import ServerConfig, read_config_file
        from staticllm.server.models.model_options import check_options
        from staticllm.server.process import SidecarOptions, serve
        from staticllm.server.sidecar import PortInUseError
    except ModuleNotFoundError as error:
        raise ConfigError(f'{error.name} is not installed: pip install "staticllm[server]"') from None
    if options["random_key"] and options["ready_fd"] is None and options["ready_file"] is None:
        raise click.UsageError(
            "--random-key goes with --ready-fd or --ready-file: otherwise the key is not known to anyone"
        )
    if options["supervise"] and options["daemon"]:
        raise click.UsageError("--supervise and --daemon: leave one of them out")
    config = ServerConfig() if options["config"] is None else read_config_file(options["config"])
    clients = tuple(entry.client() for entry in config.clients)
    settings = replace(_settings(_with_file(options, config)), clients=clients)
    settings.check()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    for name in ("uvicorn", "sse_starlette"):
        logging.getLogger(name).setLevel(logging.WARNING)
    specs, properties = _models(models, config, read_properties(options))
    settings = replace(settings, properties=properties)
    check_options(specs, settings)
    file = None if options["ready_file"] is None else Path(options["ready_file"])
    sidecar = SidecarOptions(options["ready_fd"], file, options["parent_pid"])
    try:
        serve(specs, settings, lambda url: click.echo(f"{url}/v1  {', '.join(spec.name for spec in specs)}"), sidecar)
    except PortInUseError as error:
        raise _PortInUse(str(error)) from None


def _with_file(options: dict[str, Any], config: ServerConfig) -> dict[str, Any]:
    """Return the options with those of ``--config`` that the command line does not give."""
    context = click.get_current_context()
    given = {"device": config.device or _default_device(), "host": config.host, "port": config.port}
    of_file = {
        name: found
        for name, found in given.items()
        if found is not None and context.get_parameter_source(name) is click.core.ParameterSource.DEFAULT
    }
    return {**options, **of_file}


def _default_device() -> str:
    """Return the NPU before the CPU, if there is one."""
    from staticllm.devices import get_core, kind

    return "NPU,CPU" if any(kind(name) == "NPU" for name in get_core().available_devices) else "CPU"


def _models(
    models: Sequence[str], config: ServerConfig, properties: dict[str, Any]
) -> tuple[list[ModelSpec], dict[str, Any]]:
    """Return the models of ``--config`` and of the command line with their own options, and the options for all of them."""
    from staticllm.server.models.model_options import by_model
    from staticllm.server.models.served import demo_spec, model_spec

    arguments = [*(entry.argument for entry in config.models), *models]
    for argument in arguments:
        _bring(argument)
    specs = [*(entry.spec() for entry in config.models), *map(model_spec, models)]
    return by_model(specs or [demo_spec()], arguments, {**config.options, **properties})


def _bring(model: str) -> None:
    """Download a model that is given by its name on Hugging Face; a path has no effect."""
    _, equals, path = model.partition("=")
    brought(expanded(path if equals and not Path(model).is_dir() else model))


def _settings(options: dict[str, Any]) -> ServerSettings:
    from staticllm.server.settings import ServerSettings

    keys = _keys(options["api_keys"], options["api_key_file"])
    return ServerSettings(
        **{name: options[name] for name in AS_GIVEN},
        api_keys=(secrets.token_urlsafe(32), *keys) if options["random_key"] else keys,
        is_insecure=options["insecure"],
        memory_limit=None if options["memory_limit_mb"] is None else options["memory_limit_mb"] << 20,
        is_lazy=options["lazy"],
        runs_in="worker" if options["supervise"] else "daemon" if options["daemon"] else "process",
        max_body=options["max_body_mb"] << 20,
        max_upload=options["max_upload_mb"] << 20,
        max_audio=options["max_audio_minutes"] * 60,
        has_spans=options["otel"],
    )


def _keys(given: tuple[str, ...], path: str | None) -> tuple[str, ...]:
    """Return the keys of the options, of the file, or else of the environment.

    Raises:
        ConfigError: the file cannot be read, or has no key.
    """
    keys = list(given)
    if path is not None:
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {quoted(path)} cannot be read: {error}") from None
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise ConfigError(f"--api-key-file {quoted(path)} has no key: write one per line")
        keys += found
    if not keys and (variable := os.environ.get(KEY_VARIABLE)):
        keys.append(variable)
    return tuple(dict.fromkeys(keys))


def check_cluster_options(options: dict[str, Any]) -> None:
    """Raise a ``ConfigError`` if an option of a cluster comes without ``--ray``."""
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
        from staticllm.server.ray_app.application import serve_on_cluster, settings_of
    except ModuleNotFoundError as error:
        raise ConfigError(f'{error.name} is not installed: pip install "staticllm[server,cluster]"') from None
    context = click.get_current_context()
    properties = read_properties(options)
    if own := next((name for name in properties if ":" in name), None):
        raise ConfigError(f"-p {own}: options of one model are for one machine: leave them out with --ray")
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
            "properties": properties,
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
