"""Options that more than one command takes, and what they mean for a config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from staticllm.config import StaticLLMConfig
from staticllm.errors import ConfigError

Command = TypeVar("Command", bound=Callable[..., Any])


def layout_options(command: Command) -> Command:
    """``--device`` and everything that decides which programs there are."""
    for option in reversed(
        [
            click.option("--device", default="CPU", show_default=True, help="OpenVINO device: CPU, NPU, GPU …"),
            click.option("--max-prompt-len", "max_prompt_len", type=int, help="Longest prompt, in tokens.  [1024]"),
            click.option("--min-response-len", type=int, help="Tokens kept free for the response.  [128]"),
            click.option(
                "--programs",
                type=click.Choice(["auto", "separate", "shared"]),
                help="One program a variant, or one for all.",
            ),
            click.option(
                "--precision",
                type=click.Choice(["f32", "f16", "bf16"]),
                help="Compute in this type.  [the device's own]",
            ),
            click.option("--kv-precision", type=click.Choice(["f32", "f16", "bf16"]), help="Store rows in this type."),
            click.option(
                "-p", "--property", "properties", multiple=True, metavar="NAME=VALUE", help="Any other property."
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
