"""Adds the options that several commands share, and turns them into a config."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.core import ParameterSource

from staticllm.cli.model_arguments import folder_of, model_and_texts, one_model
from staticllm.config import PROGRAMS, StaticLLMConfig
from staticllm.errors import MAX_LEN, ConfigError, PromptError, quoted
from staticllm.properties import resolve
from staticllm.system.files import refusal_of

if TYPE_CHECKING:
    from staticllm.pipelines.llm_pipeline import StaticLLMPipeline

TOKEN_IDS = (8, 1000)
"""A range of ordinary token ids that every real model's vocabulary has."""
MODEL_HELP = "Model directory.  [the embedded demo model]"
Command = TypeVar("Command", bound=Callable[..., Any])


class Number(click.FloatRange):
    """A float within limits. Unlike click's own type it refuses NaN, which no limit excludes."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


class Whole(click.IntRange):
    """A whole number from ``min`` and below 2**63, the limit of devices and random generators."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if number >= 1 << 63:
            self.fail(f"{value} is more than {(1 << 63) - 1}.", param, ctx)
        return number


def value(names: str, kind: Any, text: str, default: Any = None, **more: Any) -> Callable[[Command], Command]:
    """Return the decorator for an option with a value. ``names`` are separated by blanks; a default is shown in the help."""
    shown = {} if default is None else {"default": default, "show_default": True}
    return click.option(*names.split(), type=kind, help=text, **shown, **more)


def flag(names: str, text: str) -> Callable[[Command], Command]:
    """Return the decorator for an option without a value. ``names`` are separated by blanks."""
    return click.option(*names.split(), is_flag=True, help=text)


def refuse(names: Iterable[str], because: str) -> None:
    """Check that none of these options of the current command was given, by their names with underscores.

    ``because`` follows the flag of one that was, and says what it goes with.

    Raises:
        UsageError: one was, and would be ignored.
    """
    context = click.get_current_context()
    for parameter in context.command.params:
        is_given = context.get_parameter_source(parameter.name or "") is not ParameterSource.DEFAULT
        if parameter.name in names and parameter.expose_value and is_given:
            flag = max(parameter.opts, key=len)
            raise click.UsageError(f"{flag} {because}: it has no effect here, so leave it out")


def options_of(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return the decorator for several options, which the help lists in this order."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


look_options = options_of(
    value("--interval", click.FloatRange(min=0.1), "Seconds between looks.", 1.0),
    value("--count", click.IntRange(min=1), "End after this number of looks."),
    flag("--json as_json", "Print one JSON object per look."),
)
"""The options of commands that look again and again: those of ``terminal.look_again``."""


def model_option(command: Command) -> Command:
    """Add ``-m``/``--model``, with the demo model as default, to a command whose argument is not the model."""
    option = value("-m --model", click.Path(), MODEL_HELP)

    @wraps(command)
    def with_model(*arguments: Any, model: str | None, **options: Any) -> Any:
        return command(*arguments, model=folder_of(model), **options)

    return cast(Command, option(with_model))


def model_argument(command: Command) -> Command:
    """Add ``[MODEL]`` and its synonym ``-m``/``--model``; the default is the demo model."""
    option = value("-m --model named", click.Path(), "The same as MODEL.")
    argument = click.argument("model", type=click.Path(), required=False)

    @wraps(command)
    def with_model(*arguments: Any, model: str | None, named: str | None, **options: Any) -> Any:
        return command(*arguments, model=folder_of(one_model(model, named)), **options)

    return cast(Command, argument(option(with_model)))


PROGRAM_GROUP = {"Programs": ("max_prompt_len", "min_response_len", "programs", "precision", "kv_precision")}
"""The group of ``layout_options`` in the help; ``--device`` and ``-p`` stand among the usual ones."""


def _pairs(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[tuple[str, str]]:
    """Split ``NAME=VALUE`` options into pairs.

    Raises:
        BadParameter: one is not of this form.
        UsageError: a name is given twice, in any case.
    """
    pairs: list[tuple[str, str]] = []
    seen: set[tuple[str, str]] = set()
    for value in values:
        name, equals, text = value.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{value!r} must be NAME=VALUE, for example -p MAX_NUM_SEQS=4")
        model, _, own = name.rpartition(":")  # the options of one served model are MODEL:NAME
        if (model, own.upper()) in seen:
            raise click.UsageError(f"-p {name} is given twice, and only one would count: leave one of them out")
        seen.add((model, own.upper()))
        pairs.append((name, text))
    return pairs


property_option = click.option(
    "-p", "--property", "properties", multiple=True, metavar="NAME=VALUE", callback=_pairs, help="Any other property."
)
"""``-p NAME=VALUE``, which may be given several times."""
DEVICE_HELP = "OpenVINO device: CPU, NPU, GPU …"
_DEVICE = value("--device", None, DEVICE_HELP, "CPU")
_PRECISION = value("--precision", click.Choice(["f32", "f16", "bf16"]), "Compute in this type.  [the device's own]")
layout_options = options_of(
    _DEVICE,
    value("--max-prompt-len", click.IntRange(1, MAX_LEN), "Longest prompt, in tokens.  [1024]"),
    value("--min-response-len", click.IntRange(1, MAX_LEN), "Tokens kept free for the response.  [128]"),
    value(
        "--programs",
        click.Choice(PROGRAMS),
        "One program per variant, one for all, one per phase, or one for few rows.",
    ),
    _PRECISION,
    value("--kv-precision", click.Choice(["f32", "f16", "bf16", "u8"]), "Store keys and values in this type."),
    property_option,
)
"""``--device`` and the options that decide which programs are compiled."""
encoder_options = options_of(
    _DEVICE,
    value("--max-length", Whole(1), "Most tokens of a text; longer ones are truncated."),
    _PRECISION,
    property_option,
)
"""The options that decide how an encoder is loaded."""


def read_properties(options: dict[str, Any]) -> dict[str, Any]:
    """Return the properties that correspond to the layout options."""
    names = {
        "max_prompt_len": "MAX_PROMPT_LEN",
        "min_response_len": "MIN_RESPONSE_LEN",
        "programs": "PROGRAMS",
        "precision": "INFERENCE_PRECISION_HINT",
        "kv_precision": "KV_CACHE_PRECISION",
    }
    properties = {name: options[key] for key, name in names.items() if options[key] is not None}
    return with_properties(properties, names, options["properties"])


def with_properties(found: Mapping[str, Any], flags: Mapping[str, str], pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """Return the properties of flags and of ``-p`` options.

    Args:
        flags: The property of each flag, with underscores.

    Raises:
        UsageError: one of them is given by its flag and by ``-p``, of which one would be ignored.
    """
    for name, _ in pairs:
        key = next((key for key, own in flags.items() if own.upper() == name.upper() and own in found), None)
        if key is not None:
            raise click.UsageError(f"--{key.replace('_', '-')} and -p {name} are the same: leave one of them out")
    return {**found, **property_values(pairs)}


def property_values(pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """Return the values of ``-p`` options as numbers, truth values, lists or texts."""
    return {name: _value(text) for name, text in pairs}


def read_config(options: dict[str, Any]) -> StaticLLMConfig:
    """Return the config of the layout options.

    Raises:
        ConfigError: a property with an unknown name or an impossible value.
        DeviceError: the device is not on this machine.
    """
    from staticllm.devices import check_device, get_core, supported_properties

    core = get_core()
    known = supported_properties(core, check_device(core, options["device"]))
    return resolve(read_properties(options), known).config


def encoder_model(command: Command) -> Command:
    """Add ``-m``/``--model``, or take the first of the texts as the model, because no encoder is embedded."""

    @wraps(command)
    def with_model(*arguments: Any, model: str | None, texts: tuple[str, ...], **options: Any) -> Any:
        directory, others = model_and_texts(model, texts)
        return command(*arguments, model=directory, texts=others, **options)

    option = value("-m --model", click.Path(), "Model directory; then all arguments are texts.")
    return cast(Command, option(with_model))


def encoder_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of a pipeline for these options."""
    names = {"precision": "INFERENCE_PRECISION_HINT", "max_length": "max_length"}
    found = {name: options[key] for key, name in names.items() if options[key] is not None}
    return {"device": options["device"], **with_properties(found, names, options["properties"])}


def check_lengths(flag: str, prompt: int, answer: int, properties: dict[str, Any]) -> None:
    """Check, before the model is loaded, that the configured lengths allow the tokens that the option ``flag`` requests.

    Raises:
        UsageError: the prompt exceeds the longest prompt, or prompt and answer exceed the longest sequence.
    """
    longest = properties["MAX_PROMPT_LEN"]
    room = properties["MIN_RESPONSE_LEN"]
    if not isinstance(longest, int) or not isinstance(room, int):
        return  # the config raises the error
    if prompt > longest:
        raise click.UsageError(f"{flag}: a prompt of {prompt} tokens, --max-prompt-len is {longest}; raise it")
    if prompt + answer > longest + room:
        raise click.UsageError(
            f"{flag}: {prompt} and {answer} tokens, --max-prompt-len and --min-response-len hold {longest + room}; "
            "raise one"
        )


def as_text(argument: str, what: str) -> str:
    """Return an argument decoded as UTF-8, independent of the locale's encoding. ``what`` names it in the error.

    Raises:
        PromptError: its bytes are not UTF-8.
    """
    try:
        return os.fsencode(argument).decode("utf-8")
    except UnicodeError:
        raise PromptError(f"{what} is not text in UTF-8: convert it first") from None


def read_text(stream: Any) -> str:
    """Return all of ``stream`` decoded as UTF-8, without leading and trailing line ends.

    Raises:
        PromptError: it is binary data, or text in another encoding.
    """
    data = stream.buffer.read() if hasattr(stream, "buffer") else stream.read().encode("utf-8", "surrogateescape")
    try:
        text: str = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"standard input is not text in UTF-8 (byte 0x{data[error.start]:02x} at {error.start}): convert it first"
        ) from None
    if "\0" in text:
        raise PromptError(f"standard input is binary (a zero byte at {text.index(chr(0))}): pipe text in UTF-8")
    return text.replace("\r\n", "\n").strip("\n")


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
    """Check that a file can be written to ``output``, before the model is loaded, which may take minutes.

    Raises:
        ConfigError: ``output`` is a folder, or its folder does not exist or takes no files.
    """
    path = Path(output)
    if path.is_dir():
        raise ConfigError(f"{quoted(output)} is a folder: choose the path of a file")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"the folder {quoted(path.resolve().parent)} does not exist: make it first")
    if not path.exists() and (reason := refusal_of(path.resolve().parent)):
        raise ConfigError(
            f"{quoted(output)} cannot be written, {quoted(path.resolve().parent)} {reason}: choose another path"
        )


@contextmanager
def profiling(pipe: StaticLLMPipeline, path: str | None) -> Iterator[None]:
    """Record while a block runs; then write a Chrome trace to ``path`` and a table to stderr. Without a path, do nothing."""
    if path is None:
        yield
        return
    from staticllm.pipelines.profiling.stats import breakdown_table, breakdowns_of

    with pipe.record() as trace:
        yield
    if trace.steps:
        trace.save(path)
        click.echo(
            f"{breakdown_table(breakdowns_of(trace.steps))}\n{len(trace.steps)} device calls in {path}", err=True
        )
