"""`staticllm attach` runs a program of others so that the daemon serves its OpenVINO models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click

import staticllm
from staticllm.cli.options import flag, value
from staticllm.errors import ConfigError, quoted
from staticllm.system.files import whole_file
from staticllm.wire import endpoint

HOOK = Path(staticllm.__file__).parent / "attach" / "startup"
FILE = "staticllm-attach.pth"
"""The file in the environment's site-packages whose line Python runs at each start; ASCII, for it is read as the locale says."""
_SECONDS = 60.0
_LINE = (
    'import os, sys; os.environ.get("STATICLLM_ATTACH", "off") not in ("", "off") and not sys.flags.ignore_environment '
    'and {hook!a} not in sys.path and ((os.environ.setdefault("STATICLLM_DAEMON_COMMAND", {daemon!a}), '
    "sys.path.insert(0, {hook!a})) if os.path.isfile({module!a}) else (hasattr(sys, '_staticllm_gone') or "
    "sys.stderr and sys.stderr.write({gone!a}), setattr(sys, '_staticllm_gone', True), "  # some environments read it twice
    'os.environ["STATICLLM_ATTACH"] == "require" and os._exit(1)))\n'
)
_GONE = "staticllm attach: {module!a} is not there any more: install staticllm again, or remove {file!a}\n"


@click.command("attach", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@value("--devices", None, "Devices whose models go to the daemon, such as CPU,NPU (all).")
@value("--priority", click.IntRange(-100, 100), "Higher goes first.", 0)
@flag("--exact", "Run models as they are: the same numbers, without packing.")
@value("--require/--auto is_required", None, "Fail instead of running natively what the daemon does not serve.")
@flag("--install", "Let the programs of a Python environment attach themselves instead.")
@flag("--uninstall", "Undo --install.")
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
        found = uninstall(python)
        click.echo(f"removed {found}" if found is not None else "it was not installed")
        return
    click.echo(f"wrote {install(python, HOOK, _daemon_command())}")
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


def install(python: str, hook: Path, daemon: list[str]) -> Path:
    """Write the file into the environment of the interpreter ``python``, and return its path.

    ``hook`` is the folder with our ``sitecustomize``, which the interpreter then finds first; it runs the one that this hides.
    ``daemon`` is the command that starts the daemon.

    If ``hook`` is gone when a program starts, the program says so in one line; with STATICLLM_ATTACH=require it ends.

    Raises:
        ConfigError: the interpreter cannot be run, or its folder cannot be written.
    """
    path = _folder_of(python) / FILE
    module = str(hook / "sitecustomize.py")
    gone = _GONE.format(module=module, file=str(path))
    line = _LINE.format(hook=str(hook), module=module, daemon=json.dumps(daemon), gone=gone)
    try:
        with whole_file(path, mode=0o644) as file:  # a link is replaced, not what it names
            file.write(line.encode("ascii"))
    except OSError as error:
        raise ConfigError(f"{quoted(path)} cannot be written: {error.strerror or error}") from None
    return path


def uninstall(python: str) -> Path | None:
    """Remove the file, and return its path; None if it was not there.

    Raises:
        ConfigError: the interpreter cannot be run, or the file cannot be removed.
    """
    path = _folder_of(python) / FILE
    try:
        path.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{quoted(path)} cannot be removed: {error.strerror or error}") from None
    return path


def _folder_of(python: str) -> Path:
    """Return the folder of the packages of an interpreter."""
    if python == sys.executable:
        import sysconfig

        return Path(sysconfig.get_path("purelib"))
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    try:
        done = subprocess.run(
            [python, "-I", "-c", code], capture_output=True, text=True, timeout=_SECONDS, check=True, encoding="utf-8"
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[-200:]
        raise ConfigError(f"{quoted(python)} is no Python interpreter that can be run: {reason}") from None
    folder = Path(done.stdout.strip())
    try:
        is_there = folder.is_absolute() and folder.is_dir()
    except OSError:  # the name is too long
        is_there = False
    if not is_there:
        raise ConfigError(f"{quoted(python)} says no folder for its packages: give the path of a Python interpreter")
    return folder
