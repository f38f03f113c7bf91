"""The NPU compiler of the installed OpenVINO: a library beside its NPU plugin, as in the wheel for Windows.

Its ``main`` is the child that compiles, with the requests and answers of ``scripts/npu_compile.c``.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from staticllm.children.child import python_command, take_pipes
from staticllm.devices import get_core, npu_compiler_problem
from staticllm.errors import DeviceError
from staticllm.system.threads import start_thread

from .child_compiler import MARK, ChildCompiler, Launch

if TYPE_CHECKING:
    import openvino as ov

WHAT = "the NPU compiler of the installed OpenVINO"
REMEDY = "install openvino again, or use another machine's compiler"


def local_compiler() -> ChildCompiler:
    """Return the compiler of the installed OpenVINO.

    Raises:
        DeviceError: it has none.
    """
    if getattr(sys, "frozen", False):
        raise DeviceError(f"{WHAT} cannot be run by a frozen application: compile with a Python installation")
    problem = npu_compiler_problem(get_core())
    if problem:
        raise DeviceError(f"{WHAT} cannot be used: {problem}")
    return ChildCompiler(launch())


def launch() -> Launch:
    """Return how the child of this interpreter is started."""
    return Launch(python_command("staticllm.compiler_passes.npu_compiler.local"), {}, WHAT, REMEDY)


def main() -> None:
    """Answer the questions of the parent process."""
    questions, answers = take_pipes()
    import openvino as ov

    core = get_core()
    try:
        core.set_property("NPU", {"NPU_COMPILER_TYPE": "PLUGIN"})  # or it may say the version of a driver's compiler
        compiler = str(core.get_property("NPU", "NPU_COMPILER_VERSION"))
    except RuntimeError as error:
        _answer(answers, {"ok": False, "stage": "start", "error": str(error)})
        return
    _answer(answers, {"ok": True, "openvino": ov.get_version(), "compiler": compiler})
    waiting: queue.Queue[str] = queue.Queue()
    start_thread(lambda: _read(questions, waiting), "staticllm-requests")
    while True:
        _answer(answers, _compiled(waiting.get()))


def _read(questions: BinaryIO, waiting: queue.Queue[str]) -> None:
    """Read requests while another is compiled, to notice the end of the parent at once."""
    for line in questions:
        waiting.put(line.decode().rstrip("\r\n"))
    os._exit(0)


def _compiled(request: str) -> dict[str, Any]:
    """Compile what a request names, and return the answer."""
    model_path, blob_path, *settings = request.split("\t")
    properties = dict(each.split("=", 1) for each in settings)
    core = get_core()
    stage = "read"
    try:
        model = core.read_model(model_path)
        stage = "compile"
        begin = time.monotonic()
        compiled = core.compile_model(model, "NPU", properties)
        seconds = time.monotonic() - begin
        stage = "export"
        Path(blob_path).write_bytes(compiled.export_model().getvalue())
    except Exception as error:
        return {"ok": False, "stage": stage, "error": str(error)[:8192]}
    return {"ok": True, "seconds": round(seconds, 3), "requirements": _requirements(compiled)}


def _requirements(compiled: ov.CompiledModel) -> str:
    """Return what a device must fulfil to import the program; empty if the plugin does not say it."""
    try:
        return str(compiled.get_property("RUNTIME_REQUIREMENTS"))
    except RuntimeError:
        return ""


def _answer(answers: BinaryIO, answer: dict[str, Any]) -> None:
    answers.write(f"{MARK}{json.dumps(answer)}\n".encode())
    answers.flush()
