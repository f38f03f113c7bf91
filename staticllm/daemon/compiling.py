"""Compiles a model in a child process, because the compiler of a device may crash, and hands the blob back.

As a module (``python -m staticllm.daemon.compiling``) it is that child: one line of JSON on stdin, exit code 0 or one line on
stderr.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import openvino as ov

from staticllm.daemon.model_source import ModelSource
from staticllm.devices import get_core, kind
from staticllm.errors import DeviceError, last_line

IN_PROCESS = ("CPU",)
"""Kinds of devices whose blobs are compiled again when they are imported, and whose compilers run in this process."""
MAX_SECONDS = 1800.0
VIRTUAL_DEVICES = ("AUTO", "HETERO", "MULTI", "BATCH")
"""Devices of OpenVINO that stand for others, and that cannot export what they compile."""


def is_virtual(device: str) -> bool:
    """Return whether a device stands for others, such as ``AUTO:NPU,CPU``."""
    return device.split(":", maxsplit=1)[0].upper() in VIRTUAL_DEVICES


def compile_model(source: ModelSource, in_child: bool | None = None) -> ov.CompiledModel:
    """Return the compiled model of a source; ``in_child`` says where it is compiled, None for as the device needs it.

    Raises:
        DeviceError: the compiler crashed or refused the model.
        RuntimeError: the same, for devices that compile in this process.
    """
    if in_child is None:
        in_child = kind(source.device) not in IN_PROCESS and not is_virtual(source.device)
    core = get_core()
    config = dict(source.config)
    if not in_child:
        return core.compile_model(read(source), source.device, config)
    with tempfile.TemporaryDirectory(prefix="staticllm-") as folder:
        blob = Path(folder) / "model.blob"
        _run_child(source, blob)
        return core.import_model(blob.read_bytes(), source.device, config)


def read(source: ModelSource) -> ov.Model:
    """Return the model of a source as OpenVINO reads it."""
    return get_core().read_model(source.xml, source.weights if source.weights.is_file() else "")


def _run_child(source: ModelSource, blob: Path) -> None:
    told = {
        "xml": str(source.xml), "weights": str(source.weights), "device": source.device, "config": dict(source.config),
        "blob": str(blob),
    }  # fmt: skip
    command = [sys.executable, "-m", "staticllm.daemon.compiling"]
    try:
        result = subprocess.run(
            command, input=json.dumps(told), capture_output=True, text=True, timeout=MAX_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise DeviceError(f"{source.xml.name} was not compiled for {source.device} in {MAX_SECONDS:g} s") from None
    if result.returncode < 0 or (result.returncode and not result.stderr.strip()):
        raise DeviceError(
            f"the compiler of {source.device} crashed on {source.xml.name} (exit code {result.returncode})"
        )
    if result.returncode:
        raise DeviceError(f"{source.device} refused {source.xml.name}: {result.stderr.strip().splitlines()[-1]}")


def _child() -> int:
    told = json.loads(sys.stdin.read())
    source = ModelSource(
        Path(told["xml"]), Path(told["weights"]), told["device"], tuple(told["config"].items()), "exact", False
    )
    try:
        compiled = get_core().compile_model(read(source), source.device, dict(source.config))
        Path(told["blob"]).write_bytes(compiled.export_model().getvalue())
    except Exception as error:
        print(last_line(error), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_child())
