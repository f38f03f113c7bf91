"""Options that more than one command takes, and what they mean for a config."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from staticllm.config import StaticLLMConfig
from staticllm.errors import ConfigError

if TYPE_CHECKING:
    from staticllm.pipelines.llm_pipeline import StaticLLMPipeline

TOKEN_IDS = (8, 1000)  # ordinary tokens of every vocabulary that is not a toy
Command = TypeVar("Command", bound=Callable[..., Any])


def layout_options(command: Command) -> Command:
    """``--device`` and everything that decides which programs there are."""
    return layout_options_with("-p", "--property")(command)


def layout_options_with(*property_flags: str) -> Callable[[Command], Command]:
    """The same, where ``-p`` is taken."""
    return lambda command: _with_layout(command, property_flags)


def _with_layout(command: Command, property_flags: tuple[str, ...]) -> Command:
    for option in reversed(
        [
            click.option("--device", default="CPU", show_default=True, help="OpenVINO device: CPU, NPU, GPU …"),
            click.option("--max-prompt-len", "max_prompt_len", type=int, help="Longest prompt, in tokens.  [1024]"),
            click.option("--min-response-len", type=int, help="Tokens kept free for the response.  [128]"),
            click.option(
                "--programs",
                type=click.Choice(["auto", "separate", "shared", "phases", "single_row"]),
                help="One program a variant, one for all, one a phase, or one for single rows.",
            ),
            click.option(
                "--precision",
                type=click.Choice(["f32", "f16", "bf16"]),
                help="Compute in this type.  [the device's own]",
            ),
            click.option(
                "--kv-precision", type=click.Choice(["f32", "f16", "bf16", "u8"]), help="Store rows in this type."
            ),
            click.option(
                *property_flags, "properties", multiple=True, metavar="NAME=VALUE", help="Any other property."
            ),
        ]
    ):
        command = option(command)
    return command


def read_properties(options: dict[str, Any]) -> dict[str, Any]:
    """The properties that the layout options stand for."""
    names = {
        "max_prompt_len": "MAX_PROMPT_LEN",
        "min_response_len": "MIN_RESPONSE_LEN",
        "programs": "PROGRAMS",
        "precision": "INFERENCE_PRECISION_HINT",
        "kv_precision": "KV_CACHE_PRECISION",
    }
    properties = {name: options[key] for key, name in names.items() if options[key] is not None}
    for pair in options["properties"]:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"-p {pair!r}: must be NAME=VALUE")
        properties[name] = _value(value)
    return properties


def read_config(options: dict[str, Any]) -> StaticLLMConfig:
    """The typed config of the layout options."""
    from staticllm.pipelines.loader import device_properties

    return StaticLLMConfig.from_properties(read_properties(options), device_properties(options["device"]))


def _value(text: str) -> Any:
    if "," in text:
        return [_value(part) for part in text.split(",") if part]
    if text.lower() in ("true", "yes", "false", "no"):
        return text.lower() in ("true", "yes")
    try:
        return int(text)
    except ValueError:
        return text


def check_output(output: str) -> None:
    """Before the model is loaded: a load may take minutes."""
    path = Path(output)
    if path.is_dir():
        raise ConfigError(f"{output!r} is a folder: choose the path of a file")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"the folder {str(path.resolve().parent)!r} does not exist: make it first")


@contextmanager
def profiling(pipe: StaticLLMPipeline, path: str | None) -> Iterator[None]:
    """Record while a block runs, then write a Chrome trace to ``path`` and print a table to stderr; without a path, nothing."""
    if path is None:
        yield
        return
    from staticllm.pipelines.profile import profile_of, table

    with pipe.record() as trace:
        yield
    if trace.steps:
        trace.save(path)
        click.echo(f"{table(profile_of(trace.steps))}\n{len(trace.steps)} device calls in {path}", err=True)
