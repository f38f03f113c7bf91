"""``staticllm run`` answers a prompt or stdin, or opens a chat, with a model of this process or of a server."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from staticllm.cli.backends import SAMPLING, Backend, LocalBackend, ServerBackend, generation_of, sampling_options
from staticllm.cli.chat import Chat
from staticllm.cli.grouped_command import GroupedCommand
from staticllm.cli.model_arguments import model_and_prompt, model_directory, served_name
from staticllm.cli.options import (
    MODEL_HELP,
    PROGRAM_GROUP,
    Whole,
    as_text,
    check_output,
    flag,
    layout_options,
    profiling,
    read_properties,
    read_text,
    value,
)
from staticllm.cli.progress import progress
from staticllm.cli.server_client import ServerClient, api_key_option, server_option
from staticllm.cli.signals import ended_while_importing
from staticllm.cli.terminal import show
from staticllm.errors import PromptError

if TYPE_CHECKING:
    from staticllm.pipelines.llm_pipeline import StaticLLMPipeline

GROUPS = {
    "Sampling": tuple(row.name for row in SAMPLING),
    "Output": ("stats", "as_json", "profile"),
    "A model of a server": ("server", "api_key"),
    **PROGRAM_GROUP,
}
OF_PIPELINES = (
    "device", "max_prompt_len", "min_response_len", "programs", "precision", "kv_precision", "properties", "profile",
)  # fmt: skip
"""Options that a server decides about."""

DEMO_ANSWERS = "the embedded demo model answers, which knows little: staticllm run MODEL [PROMPT] asks another one"


@click.command("run", cls=GroupedCommand, groups=GROUPS)
@click.argument("arguments", nargs=-1, metavar="[MODEL] [PROMPT]")
@value("-m --model", click.Path(), MODEL_HELP + " With --server, a name.")
@server_option
@api_key_option
@value("-n --max-new-tokens", Whole(1), "Longest answer, in tokens.", 256)
@click.option("--system", default="", help="System message.")
@sampling_options
@flag("--raw", "Do not apply the chat template.")
@flag("--stats", "Print timings to stderr.")
@flag("--json as_json", "Print one JSON object instead of a stream.")
@value("--profile", click.Path(), "Write a Chrome trace (ui.perfetto.dev); print where a token's time goes.")
@layout_options
def command(
    arguments: tuple[str, ...], model: str | None, server: str | None, api_key: str | None, **options: Any
) -> None:
    """Generate text with MODEL: for PROMPT, for stdin if it is piped, else in a chat.

    A single argument is the model if it is a path, or looks like one, and else the prompt of the embedded demo model. A word that
    looks like the name of a model, such as llama3.2, is refused.

    In a chat, Ctrl-C stops the answer, and a second Ctrl-C leaves; /help lists the commands. With --server, a model of that
    server answers.
    """
    given = model_and_prompt(arguments, model, "embedded demo model" if server is None else "server's model")
    directory = model_directory(given.model, given.hint) if server is None else ""  # before stdin, which may wait
    prompt = _prompt(given.prompt)
    options["system"] = as_text(options["system"], "--system")
    if options["raw"] and (prompt is None or options["system"]):
        raise click.UsageError("--raw goes with a prompt and without --system: a chat needs the template")
    if prompt is None and options["as_json"]:
        raise click.UsageError("--json goes with a prompt: a chat prints text")
    if server is not None:
        _check_options(click.get_current_context())
        with ServerClient(server, api_key) as client:
            _respond(ServerBackend(client, served_name(given.model), options), prompt, options)
        return
    if api_key is not None:
        raise click.UsageError("--api-key goes with --server")
    if options["profile"] is not None:
        check_output(options["profile"])
    pipe = _load(directory, options)
    if given.model is None:
        click.echo(DEMO_ANSWERS, err=True)
    with profiling(pipe, options["profile"]):
        _respond(LocalBackend(pipe, generation_of(options)), prompt, options)


def _check_options(context: click.Context) -> None:
    """Raise a ``UsageError`` if an option was given that only the server can decide."""
    for name in OF_PIPELINES:
        if context.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE:
            option = next(each for each in context.command.params if each.name == name)
            raise click.UsageError(f"{option.opts[-1]} goes with a model of this process: give it to 'staticllm serve'")


def _prompt(argument: str | None) -> str | None:
    """Return the argument, or the text that is piped into stdin; None for a chat."""
    if argument is None and sys.stdin is None:
        raise click.UsageError("standard input is closed and there is no PROMPT: give one")
    if argument is None and sys.stdin.isatty():
        return None
    text = read_text(sys.stdin) if argument is None else as_text(argument, "the prompt")
    if not text:
        what = "the prompt is empty" if argument is not None else "standard input is empty, and there is no PROMPT"
        raise PromptError(f"{what}: give at least one character")
    return text


def _load(model: str, options: dict[str, Any]) -> StaticLLMPipeline:
    with progress("loading") as shown:
        with ended_while_importing():
            from staticllm.pipelines.llm_pipeline import StaticLLMPipeline

        return StaticLLMPipeline(model, options["device"], config=read_properties(options), on_progress=shown)


def _respond(backend: Backend, prompt: str | None, options: dict[str, Any]) -> None:
    """Print the answer to a prompt, as it comes or as one JSON object; without a prompt, chat."""
    if prompt is None:
        backend.check()
        Chat(backend, options["system"], options["stats"]).run()
        return
    with progress("running the prompt") as waiting:

        def write(piece: str) -> bool:
            if not options["as_json"]:
                waiting.close()
                show(piece)
            return False

        answer = backend.answer(prompt, options["system"], write)
    if options["as_json"]:
        click.echo(json.dumps(answer.as_dict()))
    else:
        click.echo()
    if options["stats"]:
        click.echo(answer.stats(), err=True)
