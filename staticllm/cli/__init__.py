"""The ``staticllm`` command imports each subcommand when it is used.

Exit codes: 0 for success, 1 for an error of the model, device or input (one line on stderr), 2 for wrong usage, 3 if another
process has the port of a server, 130 for Ctrl-C.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import warnings
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import click

from staticllm.cli.signals import end_with_console, ended_while_importing
from staticllm.errors import StaticLLMError, missing_runtime

_SECTIONS = {
    "Use a model": {
        "run": ("run.command", "Answer a prompt or piped text, or chat."),
        "serve": ("serve.command", "Serve models over HTTP, with OpenAI's API."),
        "embed": ("embed.embed", "Turn texts into vectors."),
        "rerank": ("embed.rerank", "Sort texts by a query."),
        "transcribe": ("transcribe.transcribe", "Write what is said in recordings."),
        "decide": ("decide.decide", "Answer typed questions with probabilities."),
        "calibrate": ("decide.calibrate", "Fit temperatures to questions with known answers."),
        "export": ("export.command", "Make a model directory of a Hugging Face model."),
    },
    "Keep models": {
        "pull": ("models.pull_models", "Download models by their names on Hugging Face."),
        "list": ("models.list_models", "List the models of this computer, or of a server."),
        "rm": ("models.remove_models", "Remove downloaded and converted models."),
    },
    "Try a model": {
        "doctor": ("model_reports.doctor", "Check packages, devices, a model and results."),
        "inspect": ("model_reports.inspect", "Show how a model would be lowered and compiled."),
        "verify": ("model_reports.verify", "Compare a model with its original, in f32."),
        "bench": ("bench.command", "Measure prompt, generation and multi-client speed."),
        "plan": ("model_reports.plan", "Estimate memory and check whether it fits."),
    },
    "Keep compiled programs": {
        "compile": ("compile.command", "Compile a model and write a set of blobs."),
        "cache": ("cache.command", "List, verify, prune, export and import blob sets."),
    },
    "Look at a server": {
        "ps": ("servers.ps", "List the loaded models of a server."),
        "stop": ("servers.stop", "Unload a model of a server."),
        "top": ("servers.top", "Watch the scheduler of a server."),
    },
    "Share a device": {
        "attach": ("attach.command", "Run a program with its OpenVINO models in the daemon."),
        "daemon": ("daemon.command", "Start, stop and watch the daemon that owns the devices."),
    },
    "Study the scheduler": {
        "simulate": ("simulate.command", "Try scheduling policies on a virtual clock."),
        "trace": ("trace.command", "Record every device call, and draw the recording."),
    },
}
"""Section of the help → name → the command in its module, which is imported when it is used, and what it does, in a line."""
_OF_OTHERS = {
    "show": "staticllm inspect MODEL and staticllm list describe models",
    "info": "staticllm inspect MODEL and staticllm list describe models",
    "cp": "a model has the name that it is served by: staticllm serve NAME=MODEL",
    "create": "staticllm serve NAME=MODEL gives a name, and --config FILE a name, a device and options (docs/server.md)",
    "alias": "staticllm serve NAME=MODEL gives a name, and --config FILE a name, a device and options (docs/server.md)",
    "models": "staticllm list shows those of this computer, with --server those of a server",
    "ls": "staticllm list shows those of this computer, with --server those of a server",
    "chat": "staticllm run MODEL opens a chat",
    "ask": "staticllm run MODEL PROMPT answers",
    "generate": "staticllm run MODEL PROMPT answers",
    "complete": "staticllm run MODEL PROMPT answers",
    "remove": "staticllm rm MODEL removes one",
    "delete": "staticllm rm MODEL removes one",
    "download": "staticllm pull OWNER/NAME brings one",
    "start": "staticllm serve MODEL starts a server",
    "server": "staticllm serve MODEL starts a server",
    "unload": "staticllm stop MODEL unloads one",
    "status": "staticllm ps and staticllm top look at a server",
    "convert": "staticllm export SOURCE DIR makes a model directory; GGUF files are converted when they are loaded",
    "quantize": "staticllm export SOURCE DIR --weights int4 makes a model directory",
    "push": "models are not published from here: hf upload does",
}
"""What other programs call their commands, and how it is done here."""
_COMMANDS = {name: entry for section in _SECTIONS.values() for name, entry in section.items()}


class _Commands(click.Group):
    """Imports a command only when it is used, and turns our errors into one line and exit code 1."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            if cmd_name in _OF_OTHERS:
                ctx.fail(f"No such command {cmd_name!r}: {_OF_OTHERS[cmd_name]}.")
            near = get_close_matches(cmd_name, _COMMANDS, n=1)
            if near:
                ctx.fail(f"No such command {cmd_name!r}: did you mean {near[0]!r}?")
            return None
        module, _, name = _COMMANDS[cmd_name][0].partition(".")
        with ended_while_importing():
            command: click.Command = getattr(import_module(f"staticllm.cli.{module}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in sections. No module of a command is imported, which would take seconds."""
        width = max(map(len, _COMMANDS))
        for title, section in _SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:<{width}}", text) for name, (_, text) in section.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except StaticLLMError as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            if error.filename is None:  # stdout failed: Python must not flush it again at exit
                sys.stdout = io.TextIOWrapper(io.BytesIO())
            if error.errno in (errno.EPIPE, errno.EINVAL):  # the reading process has ended; on Windows it is EINVAL
                ctx.exit(1)
            raise click.ClickException(f"{error.strerror}: {error.filename or 'standard output'}") from error
        except (KeyboardInterrupt, ImportError) as error:
            if isinstance(error, ImportError) and (text := missing_runtime(error)) is not None:
                raise click.ClickException(text) from error
            if not _is_interrupt(error):
                raise
            click.echo(err=True)
            ctx.exit(128 + signal.SIGINT)


def _is_interrupt(error: BaseException | None) -> bool:
    """Return whether it is Ctrl-C, or an extension's error about Ctrl-C while it was imported."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
    "color": False if os.environ.get("NO_COLOR") else None,
}


@click.command(cls=_Commands, context_settings=_SETTINGS)
@click.version_option(package_name="staticllm")
def cli() -> None:
    """Run large language models on devices that only execute graphs of fixed shape."""


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    if sys.stderr is None:  # closed by the shell
        return
    from tqdm import tqdm  # a warning clears a progress bar before it is printed

    tqdm.write(f"Warning: {message}", file=sys.stderr)


def main() -> None:
    if sys.stdout is None:  # the shell has closed it: `staticllm run … >&-`
        click.echo("Error: standard output is closed: direct it to a file or to the null device", err=True)
        sys.exit(1)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # replace characters that the console lacks, instead of failing
            is_redirected = (
                sys.platform == "win32" and not stream.isatty()
            )  # to a file or a program, which expect UTF-8
            stream.reconfigure(encoding="utf-8" if is_redirected else None, errors="replace")
    warnings.showwarning = _show_warning
    end_with_console()
    try:
        cli(standalone_mode=True)
    except KeyboardInterrupt:  # a second Ctrl-C while click handles the first
        sys.exit(128 + signal.SIGINT)
