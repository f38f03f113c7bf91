"""`staticllm attach` runs a program of others so that the daemon serves its OpenVINO models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click

import staticllm
from staticllm.cli.attach.installed_hook import install as install_hook
from staticllm.cli.attach.installed_hook import uninstall as uninstall_hook
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
@click.option("--install", is_flag=True, help="Let the programs of a Python environment attach themselves instead.")
@click.option("--uninstall", is_flag=True, help="Undo --install.")
@click.argument("command", nargs=-1)
def command(
    devices: str | None,
    priority: int,
    exact: bool,
    is_required: bool,
    install: bool,
    uninstall: bool,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND, such as python app.py, with its OpenVINO models in the daemon. The program's files are not changed.

    What the daemon does not serve runs natively, with one line that says why. The environment variable STATICLLM_ATTACH=off
    leaves a program alone.

    After `staticllm attach --install [PYTHON]`, the programs of the environment of PYTHON (by default this one) attach themselves
    wherever the environment variable STATICLLM_ATTACH is auto or require, without this command.
    """
    if install or uninstall:
        if devices is not None or priority or exact or is_required:
            raise click.UsageError(
                "--devices, --priority, --exact and --require are for a COMMAND: with --install, set STATICLLM_ATTACH=require, "
                "STATICLLM_ATTACH_DEVICES, STATICLLM_ATTACH_PRIORITY or STATICLLM_ATTACH_EXACT where the programs run."
            )
        _change_environment(install, uninstall, command)
        return
    if not command:
        raise click.UsageError("Missing argument 'COMMAND...'.")
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


def _change_environment(is_installed: bool, is_removed: bool, command: tuple[str, ...]) -> None:
    """Put the hook into an environment, or remove it, and print what was done."""
    if is_installed and is_removed:
        raise click.UsageError("--install and --uninstall: give one of them.")
    if len(command) > 1:
        raise click.UsageError("--install and --uninstall take one Python interpreter, or none for this one.")
    python = command[0] if command else sys.executable
    if is_removed:
        found = uninstall_hook(python)
        click.echo(f"removed {found}" if found is not None else "it was not installed")
        return
    click.echo(f"wrote {install_hook(python, HOOK, _daemon_command())}")
    click.echo("its programs attach themselves where STATICLLM_ATTACH is auto or require")


def _daemon_command() -> list[str]:
    return [sys.executable, "-m", "staticllm", "daemon", "start", "--foreground"]


def attached_environment(environment: dict[str, str]) -> dict[str, str]:
    """Return an environment in which Python programs attach themselves; once, however often it is applied."""
    others = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part and part != str(HOOK)]
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join([str(HOOK), *others]),
        "STATICLLM_DAEMON_COMMAND": json.dumps(_daemon_command()),
    }
