"""Adds the options that the commands for encoders share, and turns them into a pipeline's arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import click

from staticllm.cli.options import Whole, property_option, property_values
from staticllm.cli.usage.model_arguments import model_and_texts

Command = TypeVar("Command", bound=Callable[..., Any])


def encoder_model(command: Command) -> Command:
    """Add ``-m``/``--model``, or take the first of the texts as the model, because no encoder is embedded."""

    @wraps(command)
    def with_model(*arguments: Any, model: str | None, texts: tuple[str, ...], **options: Any) -> Any:
        directory, others = model_and_texts(model, texts)
        return command(*arguments, model=directory, texts=others, **options)

    option = click.option("-m", "--model", type=click.Path(), help="Model directory; then all arguments are texts.")
    return cast(Command, option(with_model))


def encoder_options(command: Command) -> Command:
    """Add the options that decide how an encoder is loaded."""
    for option in (
        property_option,
        click.option(
            "--precision", type=click.Choice(["f32", "f16", "bf16"]), help="Compute in this type.  [the device's own]"
        ),
        click.option("--max-length", type=Whole(1), help="Most tokens of a text; longer ones are truncated."),
        click.option("--device", default="CPU", show_default=True, help="OpenVINO device: CPU, NPU, GPU …"),
    ):
        command = option(command)
    return command


def encoder_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of a pipeline for these options."""
    found = dict(property_values(options["properties"]))
    if options["precision"] is not None:
        found["INFERENCE_PRECISION_HINT"] = options["precision"]
    if options["max_length"] is not None:
        found["max_length"] = options["max_length"]
    return {"device": options["device"], **found}
