"""``staticllm export`` makes a model directory of a Hugging Face model, with optimum in an environment of its own."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from staticllm.cli.options import flag, value
from staticllm.cli.progress import Progress, progress
from staticllm.cli.signals import unwound_at_signals
from staticllm.model_paths.arguments import expanded

if TYPE_CHECKING:
    from staticllm.export.environment import ExportEnvironment
    from staticllm.export.exporter import ExportRequest

REQUEST = ("device", "weights", "group_size", "is_symmetric", "task", "trusts_remote_code")
VARIABLE = "STATICLLM_EXPORT_PYTHON"
SIZE = "1.6 GB with a torch for CPUs, several GB more if pip's index has one with CUDA"


@click.command("export")
@click.argument("source", required=False)
@click.argument("target", metavar="[DIR]", required=False)
@value(
    "--device", click.Choice(["NPU", "CPU", "GPU"], case_sensitive=False), "The device that the weights suit.", "NPU"
)
@value(
    "--weights", click.Choice(["int4", "int8", "f16", "f32"]), "Their type.  [NPU: int4, CPU, GPU: int8, encoders: f16]"
)
@value("--group-size", int, "int4 weights that share a scale, or -1 for those of a channel.  [128]")
@click.option(
    "--symmetric/--asymmetric", "is_symmetric", default=None, help="Without or with zero points.  [NPU: symmetric]"
)
@value(
    "--task",
    click.Choice(["text-generation", "feature-extraction", "text-classification"]),
    "What the model is for.  [as its config.json says]",
)
@flag("--trust-remote-code trusts_remote_code", "Run Python code that the model brings.")
@flag("--setup is_setup", "Make the environment for exports, and export if SOURCE is given.")
@flag("--yes is_agreed", "Make it without a question if it is missing.")
@value("--python", click.Path(), "Export with this Python, which has the packages.", envvar=VARIABLE, show_envvar=True)
def command(source: str | None, target: str | None, **options: Any) -> None:
    """Export SOURCE to the model directory DIR: a folder with safetensors, or a name on Hugging Face (owner/name).

    torch, transformers and optimum are not installed beside staticllm: --setup makes an environment for them in the cache folder
    of this user (1.6 GB or more, with pip). A name is looked up in the Hugging Face cache, and downloaded if it is not there.
    """
    if source is None and not options["is_setup"]:
        raise click.UsageError("give SOURCE and DIR, or --setup")
    if source is not None and target is None:
        raise click.UsageError(f"give the folder to write: staticllm export {source} DIR")
    from staticllm.export.exporter import ExportRequest, check_request

    taken = {name: options[name] for name in REQUEST}
    request = ExportRequest(expanded(source), Path(expanded(target)), **taken) if source and target else None
    if request is not None:
        check_request(request)
    with unwound_at_signals():
        interpreter = _interpreter(options["python"], options["is_setup"], options["is_agreed"])
        if request is not None:
            _export(request, interpreter)


def _export(request: ExportRequest, interpreter: Path) -> None:
    begin = time.monotonic()
    with progress("exporting") as shown:
        from staticllm.export.exporter import export

        exported = export(request, interpreter, Steps(shown))
    size = f"{exported.num_bytes / 1e6:.0f} MB in {time.monotonic() - begin:.0f} s"
    click.echo(f"{exported.directory}: {exported.weights}; {size}")
    if exported.difference:
        click.echo(f"the tokenizer differs from the original: {exported.difference}", err=True)
    if exported.is_decoder:
        click.echo(f"try it: staticllm run {exported.directory}", err=True)


def _interpreter(given: str | None, is_setup: bool, is_agreed: bool) -> Path:
    """Return the Python that exports: the given one, or that of the environment, which is made if that was asked for."""
    from staticllm.errors import ConfigError
    from staticllm.export.environment import check_python, default_folder, find_environment

    if given is not None:
        if is_setup:
            raise click.UsageError(
                f"--setup makes an environment, and --python (or {VARIABLE}) names one: leave one out"
            )
        python = Path(expanded(given)).absolute()  # not resolved: the link to an interpreter tells its environment
        check_python(python)
        return python
    found = find_environment()
    if found is not None and not is_setup:
        return found.python
    if not (is_setup or is_agreed or _agrees(default_folder())):
        raise ConfigError(
            "exports need torch, transformers and optimum, in an environment of their own: make it with "
            f"`staticllm export --setup` ({SIZE}), or give --python"
        )
    return _set_up().python


def _agrees(folder: Path) -> bool:
    if not (sys.stdin is not None and sys.stdin.isatty() and sys.stderr is not None and sys.stderr.isatty()):
        return False
    click.echo(f"Exports need torch, transformers and optimum: pip would install them to {folder} ({SIZE}).", err=True)
    return click.confirm("Install them now?", err=True)


def _set_up() -> ExportEnvironment:
    begin = time.monotonic()
    with progress("setting up the environment for exports") as shown:
        from staticllm.export.environment import set_up

        found = set_up(Steps(shown))
    click.echo(f"{found.num_bytes / 1e9:.1f} GB in {found.folder} ({time.monotonic() - begin:.0f} s)", err=True)
    return found


class Steps:
    """Shows each step on stderr: on a terminal in the line of progress, with its details, else as a line of its own."""

    def __init__(self, shown: Progress) -> None:
        self._shown = shown
        self._is_terminal = sys.stderr is not None and sys.stderr.isatty()

    def __call__(self, text: str, detail: str = "") -> None:
        self._shown.show(f"{text}: {detail}" if detail else text)
        if not self._is_terminal and not detail:
            click.echo(text, err=True)
