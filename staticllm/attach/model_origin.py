"""Where a model comes from: the files that the daemon reads, or a copy in the runtime folder that is written for it."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import shutil
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from ..wire import endpoint
from ..wire.file_stamp import Stamp, stamp_of

_numbers = count(1)


@dataclass(frozen=True)
class FileOrigin:
    """The files from which ``Core.read_model`` made a model, their state then, and a digest of the model."""

    xml: Path
    weights: Path
    stamps: tuple[Stamp, ...]
    digest: str
    is_mapped: bool
    """Whether the weights are the file's own memory, which cannot be written."""

    def is_unchanged(self) -> bool:
        """Return whether the files are still those that were read."""
        return self.stamps == _stamps(self.xml, self.weights)


@dataclass(frozen=True)
class NativeOrigin:
    """What the daemon is told of a model, and the copy that was written for it."""

    xml: Path
    weights: Path
    device: str
    config: dict[str, Any]
    is_exact: bool
    is_copy: bool = False
    stamps: tuple[Stamp, ...] = field(default=())

    @property
    def name(self) -> str:
        return "in memory" if self.is_copy else str(self.xml)

    def describe(self) -> dict[str, Any]:
        """Return the body of a ``MODEL`` message."""
        body: dict[str, Any] = {
            "spool" if self.is_copy else "path": str(self.xml), "device": self.device, "config": self.config,
            "mode": "exact" if self.is_exact else "auto", "stamp": [list(stamp) for stamp in self.stamps],
        }  # fmt: skip
        if self.weights.is_file():
            body["weights"] = str(self.weights)
        return body

    def close(self) -> None:
        """Delete the copy, in the process that wrote it."""
        if self.is_copy and f"-{os.getpid()}-" in self.xml.name:
            atexit.unregister(self.close)
            with contextlib.suppress(OSError):
                self.xml.unlink(missing_ok=True)
                self.weights.unlink(missing_ok=True)


def maps_weights(core: Any, config: Mapping[str, Any]) -> bool:
    """Return whether ``core.read_model`` with ``config`` maps weights files; False if it does not say."""
    try:
        value = config["ENABLE_MMAP"] if "ENABLE_MMAP" in config else core.get_property("ENABLE_MMAP")
    except RuntimeError:
        return False
    return str(value).upper() not in ("FALSE", "NO", "0")


def origin_of(model: Any, path: Any, weights: Any, is_mapped: bool) -> FileOrigin | None:
    """Return the origin of a model that was read from an IR, with ``ENABLE_MMAP`` or not; None if it came from something else."""
    if not isinstance(path, (str, os.PathLike)) or not (weights is None or isinstance(weights, (str, os.PathLike))):
        return None
    try:
        xml = Path(path).resolve()
        other = Path(weights).resolve() if weights else xml.with_suffix(".bin")
        if xml.suffix != ".xml" or not xml.is_file():
            return None
        return FileOrigin(xml, other, _stamps(xml, other), digest_of(model, is_mapped), is_mapped)
    except OSError:  # a text that is no path
        return None


def native_origin_of(model: Any, device: str, config: dict[str, Any], is_exact: bool) -> NativeOrigin:
    """Return the origin of a model: its files if it has not been changed since it was read, else a copy.

    Raises:
        OSError: the copy cannot be written.
    """
    origin: FileOrigin | None = getattr(model, "_staticllm_origin", None)
    if origin is not None and origin.is_unchanged() and origin.digest == digest_of(model, origin.is_mapped):
        return NativeOrigin(origin.xml, origin.weights, device, config, is_exact, stamps=origin.stamps)
    xml = save_copy(model)
    native = NativeOrigin(xml, xml.with_suffix(".bin"), device, config, is_exact, is_copy=True)
    atexit.register(native.close)
    return native


def digest_of(model: Any, is_mapped: bool) -> str:
    """Return a digest of the operations, their attributes, connections, shapes, names and weights.

    Weights count by their addresses in the program, because a constant that replaces another one lies elsewhere; by their
    values as well if they are not ``is_mapped``, because a program can write such.
    """
    digest = hashlib.sha256()
    if model.has_rt_info(["runtime_options"]):  # the device reads them
        digest.update(repr(_plain(model.get_rt_info(["runtime_options"]))).encode())
    for node in model.get_ordered_ops():
        inputs = [(port.get_source_output().get_node().get_friendly_name(), port.get_source_output().get_index())
                  for port in node.inputs()]  # fmt: skip
        outputs = [(port.get_element_type().get_type_name(), sorted(port.get_names())) for port in node.outputs()]
        weights = _weights_of(node, is_mapped) if node.get_type_name() == "Constant" else None
        digest.update(repr((str(node), node.get_attributes(), inputs, outputs, weights)).encode())
        for name in ("get_function", "get_then_body", "get_else_body"):
            if hasattr(node, name):  # the bodies of TensorIterator, Loop and If
                digest.update(digest_of(getattr(node, name)(), is_mapped).encode())
    return digest.hexdigest()


def _weights_of(node: Any, is_mapped: bool) -> tuple[Any, ...]:
    if node.get_element_type().get_type_name() == "string":
        return tuple(node.get_value_strings())
    data = node.data
    sum_of_values = 0 if is_mapped else zlib.crc32(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
    return data.ctypes.data, data.nbytes, sum_of_values


def _plain(options: Any) -> Any:
    value = getattr(options, "value", options)
    return {key: _plain(each) for key, each in value.items()} if hasattr(value, "items") else str(value)


def save_copy(model: Any) -> Path:
    """Write a model into the runtime folder, and return the path of its xml.

    Raises:
        OSError: it cannot be written; the parts of it are deleted, and the text names the folder and its free space.
    """
    from openvino._pyopenvino import save_model

    folder = endpoint.runtime_folder()
    _delete_orphans(folder)
    xml = folder / f"model-{os.getpid()}-{next(_numbers)}.xml"
    try:
        save_model(model, str(xml), False)
        for path in (xml, xml.with_suffix(".bin")):
            if path.is_file():
                path.chmod(0o600)
    except BaseException as error:
        xml.unlink(missing_ok=True)
        xml.with_suffix(".bin").unlink(missing_ok=True)
        if not isinstance(error, (OSError, RuntimeError)):
            raise
        free = shutil.disk_usage(folder).free / 1e6  # OpenVINO's own text names the stream, not the cause
        raise OSError(
            f"a copy of this model, changed in memory, cannot be written to {folder} ({free:.0f} MB free there): "
            "free space, or set STATICLLM_RUNTIME_DIR to a folder of a larger disk"
        ) from error
    return xml


def _delete_orphans(folder: Path) -> None:
    """Delete the copies of processes that have gone."""
    for path in folder.glob("model-*-*.*"):
        pid = path.name.split("-")[1]
        if pid.isdigit() and int(pid) != os.getpid() and not _runs(int(pid)):
            with contextlib.suppress(OSError):  # another program deletes it as well
                path.unlink(missing_ok=True)


if sys.platform == "win32":
    import ctypes

    _NO_SUCH_PROCESS = 87
    _QUERY = 0x1000
    """The least right that a process can be opened with."""
    _kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    _kernel.OpenProcess.restype = ctypes.c_void_p
    _kernel.CloseHandle.argtypes = (ctypes.c_void_p,)

    def _runs(pid: int) -> bool:
        """Return whether there is a process of this number. A signal of 0 would end it here."""
        process = _kernel.OpenProcess(_QUERY, False, pid)
        if process:
            _kernel.CloseHandle(process)
            return True
        return ctypes.get_last_error() != _NO_SUCH_PROCESS
else:

    def _runs(pid: int) -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except OSError:  # that of another user
            return True
        return True


def _stamps(*paths: Path) -> tuple[Stamp, ...]:
    return tuple(stamp_of(path) for path in paths if path.is_file())
