"""`staticllm attach` runs a program of others so that the daemon serves its OpenVINO models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click

import staticllm
from staticllm.errors import ConfigError
from staticllm.wire import endpoint

HOOK = Path(staticllm.__file__).parent / "attach" / "startup"


@click.command("attach", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--devices", help="Devices whose models go to the daemon, such as CPU,NPU (all).")
@click.option("--priority", type=click.IntRange(-100, 100), default=0, show_default=True, help="Higher goes first.")
@click.option("--exact", is_flag=True, help="Run models as they are: the same numbers, without packing.")
@click.option(
    "--require/--auto", "is_required", help="Fail instead of running natively what the daemon does not serve."
)
@click.argument("command", nargs=-1, required=True)
def command(devices: str | None, priority: int, exact: bool, is_required: bool, command: tuple[str, ...]) -> None:
    """Run COMMAND, such as python app.py, with its OpenVINO models in the daemon. The program's files are not changed.

    What the daemon does not serve runs natively, with one line that says why. The environment variable STATICLLM_ATTACH=off
    leaves a program alone.
    """
    environment = attached_environment(dict(os.environ))
    environment["STATICLLM_ATTACH"] = "require" if is_required else "auto"
    environment["STATICLLM_ATTACH_PRIORITY"] = str(priority)
    environment["STATICLLM_ATTACH_EXACT"] = "1" if exact else "0"
    if devices is not None:
        environment["STATICLLM_ATTACH_DEVICES"] = devices
    try:
        endpoint.runtime_folder()
    except endpoint.EndpointError as error:
        if is_required:
            raise ConfigError(str(error)) from error
    sys.stdout.flush()
    try:
        if sys.platform == "win32":  # where exec returns to the shell at once
            raise SystemExit(subprocess.run(command, env=environment, check=False).returncode)
        os.execvpe(command[0], command, environment)
    except OSError as error:
        raise ConfigError(f"{command[0]!r} cannot be run: {error.strerror}") from error


def attached_environment(environment: dict[str, str]) -> dict[str, str]:
    """Return an environment in which Python programs attach themselves; once, however often it is applied."""
    others = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part and part != str(HOOK)]
    daemon = [sys.executable, "-m", "staticllm", "daemon", "start", "--foreground"]
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join([str(HOOK), *others]),
        "STATICLLM_DAEMON_COMMAND": json.dumps(daemon),
    }
