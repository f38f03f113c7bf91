"""Sets up Intel's NPU compiler where there is no NPU, and says whether there is one.

python scripts/npu_compiler.py setup     # once per version of OpenVINO
python scripts/npu_compiler.py status
python scripts/npu_compiler.py remove
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click
from npu_setup import remove, set_up

from staticllm.cli.options import flag, value
from staticllm.cli.progress import progress
from staticllm.cli.signals import unwound_at_signals
from staticllm.compiler_passes.npu_compiler.find import compiler_statuses
from staticllm.compiler_passes.npu_compiler.wine import default_folder
from staticllm.errors import StaticLLMError


@click.group()
def command() -> None:
    """Compile for NPUs on a machine without one. On Linux, OpenVINO's Windows wheel runs under Wine."""


@command.command()
@value(
    "--wheel", click.Path(exists=True, dir_okay=False, path_type=Path), "OpenVINO's wheel for Windows, on this disk."
)
@flag("--install-packages is_installing", "Install Wine and mingw-w64 with apt-get if they are missing (as root).")
@flag("--force is_forced", "Set it up again, after a damage or an update.")
def setup(wheel: Path | None, is_installing: bool, is_forced: bool) -> None:
    """Set up the NPU compiler under Wine, for the installed version of OpenVINO.

    It needs Wine and mingw-w64, which it does not install by itself; downloads OpenVINO's wheel for Windows (85 MB) with pip; and
    keeps 0.9 GB in the cache folder of this user. Nothing else of this machine is changed.
    """
    with unwound_at_signals(), progress("setting up the NPU compiler") as shown:
        is_terminal = sys.stderr is not None and sys.stderr.isatty()

        def on_step(text: str, number: int, total: int) -> None:
            shown.show(text, number - 1, total)
            if not is_terminal:
                click.echo(f"{number} of {total}: {text}", err=True)

        found = set_up(wheel=wheel, installs_packages=is_installing, is_forced=is_forced, on_step=on_step)
    click.echo(f"{found.version}, {found.num_bytes / 1e9:.1f} GB in {found.folder}")


@command.command("status")
@flag("--json as_json", "Print JSON.")
def show_status(as_json: bool) -> None:
    """Say which NPU compilers can be used. Exit code 1 if there is none."""
    with progress("looking for compilers"):
        found = compiler_statuses()
    if as_json:
        click.echo(json.dumps([asdict(each) for each in found], indent=2))
    else:
        for each in found:
            click.echo(f"{each.kind:<6} {each.version or f'no: {each.problem}'}")
    if not any(each.version for each in found):
        raise SystemExit(1)


@command.command("remove")
def remove_setup() -> None:
    """Remove what `setup` has made, for all versions of OpenVINO."""
    num_bytes = remove()
    click.echo(f"{num_bytes / 1e9:.1f} GB removed" if num_bytes else f"nothing is set up in {default_folder().parent}")


if __name__ == "__main__":
    try:
        command()
    except StaticLLMError as error:
        sys.exit(f"Error: {error}")
