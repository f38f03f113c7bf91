"""`staticllm daemon` starts, stops and watches the daemon that owns the devices for all programs of a user."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from staticllm.cli.options import flag, look_options, value
from staticllm.cli.progress import Progress, progress
from staticllm.cli.terminal import look_again
from staticllm.errors import StaticLLMError
from staticllm.system.table import table
from staticllm.wire import endpoint
from staticllm.wire.messages import Kind, Message

CLIENT_COLUMNS = (
    "pid", "program", "priority", "calls", "device s", "prefill s", "decode s", "queued s", "read GB", "share",
)  # fmt: skip


@click.group("daemon")
def command() -> None:
    """Share the devices of this machine among programs: one process owns them."""


@command.command()
@flag("--foreground", "Be the daemon, instead of starting it in the background.")
@value("--idle-seconds", click.FloatRange(min=0.1), "Seconds without a program after which it ends (600).")
@click.option("--worker-of", type=click.IntRange(1), hidden=True)  # staticllm serve --supervise
def start(foreground: bool, idle_seconds: float | None, worker_of: int | None) -> None:
    """Start the daemon; programs under `staticllm attach` also start it when they need it."""
    from staticllm.daemon.limits import default_limits, worker_limits
    from staticllm.daemon.process import lifetime

    folder = _folder()
    if worker_of is not None:
        lifetime.serve(folder, worker_limits(), worker_of)
        return
    if not foreground:
        if idle_seconds is not None and (found := lifetime.status(folder)) is not None:
            click.echo(
                f"daemon {found['pid']} runs already, on which --idle-seconds {idle_seconds:g} has no effect: end it first "
                "with staticllm daemon stop",
                err=True,
            )  # a program that makes sure of a daemon at each start must not fail
        click.echo(f"daemon {lifetime.start(folder, idle_seconds)} serves {folder}")
        return
    limits = default_limits()
    if idle_seconds is not None:
        limits = replace(limits, idle_seconds=idle_seconds)
    lifetime.serve(folder, limits)


@command.command()
def stop() -> None:
    """End the daemon. Programs that use it start another one, or go on natively."""
    from staticllm.daemon.process import lifetime

    pid = lifetime.stop(_folder())
    click.echo("no daemon runs" if pid is None else f"daemon {pid} has ended")


@command.command("status")
@flag("--json as_json", "Print JSON.")
def show_status(as_json: bool) -> None:
    """Say whether the daemon runs, which models it has, and which programs use it. Exit code 1 if it does not run."""
    from staticllm.daemon.process import lifetime

    found = lifetime.status(_folder())
    if as_json:
        click.echo(json.dumps(found or {"pid": None}, indent=2))
    elif found is None:
        click.echo("no daemon runs")
    else:
        click.echo("\n".join(_lines(0.0, found, None)))
    if found is None:
        raise click.exceptions.Exit(1)


@command.command()
@look_options
def top(interval: float, count: int | None, as_json: bool) -> None:
    """Show again and again which programs use the devices."""
    from staticllm.daemon.process import lifetime

    folder = _folder()

    def look(_: dict[str, Any] | None) -> dict[str, Any]:
        found = lifetime.status(folder)
        if found is None:
            raise StaticLLMError("no daemon runs: staticllm daemon start starts it")
        return found

    look_again(look, partial(_lines, interval), interval, count, as_json)


@command.command()
@value("--seconds", click.FloatRange(min=0.1), "How long to record.", 5.0)
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), default=Path("daemon_trace.json"))
def trace(seconds: float, output: Path) -> None:
    """Record which programs use the devices, as a Chrome trace with a track for each program."""
    from staticllm.daemon.process import lifetime
    from staticllm.pipelines.daemon_client.daemon_link import ask

    if not output.absolute().parent.is_dir():
        raise StaticLLMError(f"{output} cannot be written: there is no folder {output.parent}")
    try:
        with lifetime.control(_folder()) as channel:
            ask(channel, Message(Kind.TRACE, body={"action": "begin"}))
            with progress("recording") as shown:
                _wait(seconds, shown)
            path = str(output.absolute())
            found = ask(channel, Message(Kind.TRACE, body={"action": "end", "path": path}))
    except endpoint.EndpointError as error:
        raise StaticLLMError(f"no daemon runs: {error}") from error
    click.echo(f"{found.body['events']} uses of devices in {output}: open it in https://ui.perfetto.dev")


def _wait(seconds: float, shown: Progress) -> None:
    """Wait, and show how much of the time has passed."""
    start = time.monotonic()
    while (passed := time.monotonic() - start) < seconds:
        shown.show("recording (s)", int(passed), round(seconds))
        time.sleep(min(0.1, seconds - passed))


def _folder() -> Any:
    try:
        return endpoint.runtime_folder()
    except endpoint.EndpointError as error:
        raise StaticLLMError(str(error)) from error


def _lines(seconds: float, found: dict[str, Any], before: dict[str, Any] | None) -> list[str]:
    """Return the daemon, its models, and its clients, with their share of the device in the ``seconds`` since ``before``."""
    minutes = (time.time() - found["since"]) / 60
    lines = [f"daemon {found['pid']}, up {minutes:.0f} min, {found['memory'] >> 20} MiB, OpenVINO {found['openvino']}"]
    for model in found["models"]:
        size = f"{model['bytes'] / 2**20:.0f} MiB"
        lines.append(
            f"  model {model['id']}: {model['path']} on {model['device']}, {model['mode']}, {size}, used by {model['users']}"
        )
    old = {client["pid"]: client for client in (before or {"clients": []})["clients"]}
    rows = []
    for client in found["clients"]:
        share = ""
        if before is not None and client["pid"] in old:
            share = f"{(client['device_seconds'] - old[client['pid']]['device_seconds']) / seconds:.0%}"
        phases = client["by_phase"]
        times = (
            client["device_seconds"],
            phases.get("prefill", 0.0),
            phases.get("decode", 0.0),
            client["queued_seconds"],
        )
        counts = [str(client[name]) for name in ("priority", "calls")]
        gigabytes = f"{client['read_bytes'] / 1e9:.2f}"
        rows.append(
            [str(client["pid"]), client["program"][:24], *counts, *map("{:.2f}".format, times), gigabytes, share]
        )
    return [*lines, table(CLIENT_COLUMNS, rows)]
