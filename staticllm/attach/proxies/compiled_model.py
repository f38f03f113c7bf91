"""`openvino.CompiledModel` over a ghost: ports are OpenVINO's own, and the requests run in the daemon."""

from __future__ import annotations

import contextlib
from typing import Any

from openvino._ov_api import CompiledModel, Model
from openvino._pyopenvino import CompiledModel as CompiledModelBase

from ..far_model import FarModel
from ..far_request import FarRequest
from .infer_request import AttachedInferRequest


class AttachedCompiledModel(CompiledModel):  # type: ignore[misc]
    """A compiled model that the daemon serves."""

    def __init__(self, ghost: Any, far: FarModel) -> None:
        super().__init__(ghost)
        self._far = far

    def __repr__(self) -> str:
        return str(super().__repr__()).replace(AttachedCompiledModel.__name__, CompiledModel.__name__, 1)

    def create_infer_request(self) -> AttachedInferRequest:
        """Return a new infer request."""
        far = self._far
        base = CompiledModelBase.create_infer_request(self)
        return AttachedInferRequest(base, FarRequest(far), lambda ghost: AttachedCompiledModel(ghost, far))

    def get_property(self, property: str) -> Any:
        """Return a property of the compiled model."""
        if not isinstance(property, str):
            return CompiledModelBase.get_property(self, property)  # raises as natively
        return self._far.get_property(property)

    def set_property(self, *args: Any, **kwargs: Any) -> None:
        """Set properties."""
        with contextlib.suppress(RuntimeError):  # checks the arguments; the ghost's own properties mean nothing
            CompiledModelBase.set_property(self, *args, **kwargs)
        given = next(iter((*args, *kwargs.values())))
        self._far.set_property(dict([given] if isinstance(given, tuple) else given))

    def export_model(self, *args: Any, **kwargs: Any) -> Any:
        """Export the compiled model, which is compiled in this program for it."""
        return self._far.native().export_model(*args, **kwargs)

    def get_runtime_model(self) -> Model:
        """Return the graph that runs, of the model compiled in this program for it."""
        return self._far.native().get_runtime_model()

    def release_memory(self) -> None:
        """Release what the program does not need; the daemon's memory belongs to all its clients."""
        CompiledModelBase.release_memory(self)
