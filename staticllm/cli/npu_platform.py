"""The options ``--platform`` and ``--compiler``, which commands have that compile for an NPU elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from staticllm.cli.options import refuse, value
from staticllm.cli.signals import unwound_at_signals
from staticllm.errors import ConfigError

if TYPE_CHECKING:
    from staticllm.pipelines.loading.npu_target import CompiledForNPU, NPUTarget

MOST_COMPILERS = 4
"""Processes that compile at once; each takes some 150 MB, and more for large parts."""
F = TypeVar("F", bound=Callable[..., Any])


def platform_options(command: F) -> F:
    platform = value("--platform", str, "Compile for an NPU elsewhere: 3720 (Meteor Lake), 4000 (Lunar Lake) or 5010.")
    kinds = click.Choice(["auto", "local", "wine"])
    compiler = value("--compiler", kinds, "The NPU compiler for --platform (docs/npu.md).", "auto")
    return platform(compiler(command))


def check_platform(platform: str | None, device: str, is_verified: bool = False) -> None:
    """Check that the options fit together.

    Raises:
        ConfigError: the device is no NPU, or the set would be run here.
        UsageError: an option of ``--platform`` stands without it.
    """
    if platform is None:
        refuse(("compiler",), "is for --platform")
        return
    if device.upper() != "NPU":
        raise ConfigError(f"--platform {platform} is of an NPU, and the device is {device!r}: give --device NPU")
    if is_verified:
        raise ConfigError("--verify runs the set, and its NPU is elsewhere: verify it there, or leave --platform out")


@contextmanager
def npu_target(
    platform: str | None, compiler: str, on_part: Callable[[CompiledForNPU], None] = lambda part: None
) -> Iterator[NPUTarget | None]:
    """Find the compiler for a platform, and end its process afterwards, also after a signal; None without a platform.

    Raises:
        ConfigError: the platform is unknown.
        DeviceError: there is no compiler.
    """
    if platform is None:
        yield None
        return
    from staticllm.compiler_passes.artifacts.measurements import usable_cores
    from staticllm.compiler_passes.compiling.npu_platform import platform_of
    from staticllm.compiler_passes.npu_compiler.find import find_compiler
    from staticllm.pipelines.loading.npu_target import NPUTarget

    known = platform_of(platform)
    found = tuple(find_compiler(compiler) for _ in range(min(usable_cores(), MOST_COMPILERS)))
    with unwound_at_signals():
        try:
            yield NPUTarget(known, found, on_part)
        finally:
            for each in found:
                each.close()
