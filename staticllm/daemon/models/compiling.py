"""Compiles a model in a child process, because the compiler of a device may crash, and hands the blob back.

As a module (``python -m staticllm.daemon.models.compiling``) it is that child: one message with the origin, and one answer.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openvino as ov

from staticllm.children.answers import answer_all, check
from staticllm.children.child import Child, ChildLostError, last_words
from staticllm.daemon.models.client_models import ModelOrigin
from staticllm.daemon.sharing.devices import is_virtual
from staticllm.devices import get_core, kind
from staticllm.errors import DeviceError, last_line
from staticllm.wire.messages import Kind, Message

IN_PROCESS = ("CPU",)
"""Kinds of devices whose blobs are compiled again when they are imported, and whose compilers run in this process."""
MAX_SECONDS = 1800.0


def compile_model(origin: ModelOrigin, in_child: bool | None = None) -> ov.CompiledModel:
    """Return the compiled model of an origin; ``in_child`` says where it is compiled, None for as the device needs it.

    Raises:
        DeviceError: the compiler crashed or refused the model.
        RuntimeError: the same, for devices that compile in this process.
    """
    if in_child is None:
        in_child = kind(origin.device) not in IN_PROCESS and not is_virtual(origin.device)
    core = get_core()
    config = dict(origin.config)
    if not in_child:
        return core.compile_model(read(origin.xml, origin.weights), origin.device, config)
    with tempfile.TemporaryDirectory(prefix="staticllm-") as folder:
        blob = Path(folder) / "model.blob"
        _run_child(origin, blob)
        return core.import_model(blob.read_bytes(), origin.device, config)


def read(xml: Path, weights: Path) -> ov.Model:
    """Return a model as OpenVINO reads it; ``weights`` may be missing."""
    return get_core().read_model(xml, weights if weights.is_file() else "")


def _run_child(origin: ModelOrigin, blob: Path) -> None:
    body = {
        "xml": str(origin.xml), "weights": str(origin.weights), "device": origin.device, "config": dict(origin.config),
        "blob": str(blob),
    }  # fmt: skip
    errors = blob.with_suffix(".err")
    command = [sys.executable, "-m", "staticllm.daemon.models.compiling"]
    try:
        with Child(command, has_pipes=True, errors=errors) as child:
            check(child.ask(Message(Kind.MODEL, body=body), MAX_SECONDS))
    except TimeoutError:
        raise DeviceError(f"{origin.xml.name} was not compiled for {origin.device} in {MAX_SECONDS:g} s") from None
    except ChildLostError as error:
        said = last_words(errors)
        raise DeviceError(
            f"the compiler of {origin.device} crashed on {origin.xml.name} (exit code {error.code})"
            + (f": {said}" if said else "")
        ) from None


def _answer(told: Mapping[str, Any]) -> dict[str, Any]:
    model = read(Path(told["xml"]), Path(told["weights"]))
    compiled = get_core().compile_model(model, told["device"], told["config"])
    Path(told["blob"]).write_bytes(compiled.export_model().getvalue())
    return {}


def _failure(error: Exception, told: Mapping[str, Any]) -> DeviceError:
    return DeviceError(f"{told['device']} refused {Path(told['xml']).name}: {last_line(error)}")


if __name__ == "__main__":
    answer_all(_answer, _failure)
