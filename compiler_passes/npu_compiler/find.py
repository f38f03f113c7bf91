"""Finds an NPU compiler: that of the installed OpenVINO, or that of its Windows wheel under Wine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from staticllm.devices import get_core, npu_compiler_problem
from staticllm.errors import ConfigError, DeviceError, shown

from .child_compiler import ChildCompiler
from .local import local_compiler
from .wine import COMMAND, WHERE, default_folder, read_setup, wine_compiler

CompilerKind = Literal["auto", "local", "wine"]
"""Where the compiler is: ``local`` in the installed OpenVINO, ``wine`` in its Windows wheel, ``auto`` in the first of them."""
COMPILER_KINDS: tuple[str, ...] = get_args(CompilerKind)


@dataclass(frozen=True)
class CompilerStatus:
    """Whether a kind of compiler can be used: its versions or, if not, the problem."""

    kind: str
    version: str = ""
    problem: str = ""


def find_compiler(kind: str = "auto") -> ChildCompiler:
    """Return an NPU compiler, which starts its process when it is first used.

    Raises:
        ConfigError: the kind is unknown.
        DeviceError: there is none; the message says how to get one.
    """
    if kind not in COMPILER_KINDS:
        raise ConfigError(f"compiler {shown(kind)} is not known: use one of {', '.join(COMPILER_KINDS)}")
    if kind == "local":
        return local_compiler()
    if kind == "wine":
        return wine_compiler()
    try:
        return local_compiler()
    except DeviceError as local:
        if not default_folder().is_dir():
            raise DeviceError(
                f"there is no NPU compiler ({local}): on Linux, `{COMMAND}` sets one up under Wine, {WHERE}"
            ) from None
        return wine_compiler()


def compiler_statuses() -> tuple[CompilerStatus, ...]:
    """Return what is known of each kind, without starting a process."""
    import openvino as ov

    problem = npu_compiler_problem(get_core())
    local = CompilerStatus("local", "" if problem else f"openvino {ov.get_version()}", problem)
    try:
        return local, CompilerStatus("wine", read_setup(default_folder()).version)
    except DeviceError as error:
        return local, CompilerStatus("wine", problem=str(error))
