"""The placeholder of a model: compiled, with the same inputs and outputs, and without the work between them.

``openvino.CompiledModel`` and ``openvino.InferRequest`` cannot be made without a compiled model, and programs ask for these
classes. The ports, tensors, checks and casts are OpenVINO's own. The outputs are NaN, so that a call that runs by accident is
noticed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from openvino._pyopenvino import Core as CoreBase
from openvino._pyopenvino import Model as ModelBase
from openvino._pyopenvino import Type

_core: list[Any] = []
TYPES = frozenset(["boolean", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "f16", "f32", "f64"])
"""Element types that a placeholder and the messages to the daemon can have."""


class PortError(ValueError):
    """A model whose ports a placeholder cannot have."""


def check_ports(model: Any) -> None:
    """Check that a model can have a placeholder.

    Raises:
        PortError: it has no inputs, or a port of an unknown type or rank.
    """
    if not model.inputs:
        raise PortError("the model has no inputs")
    for port in (*model.inputs, *model.outputs):
        name = port.get_element_type().get_type_name()
        if name not in TYPES:
            raise PortError(f"a port of the element type {name}")
    for port in model.outputs:
        if port.get_partial_shape().rank.is_dynamic:
            raise PortError("an output of dynamic rank")


def compile_placeholder(model: Any) -> Any:
    """Return the compiled placeholder of a model, an ``openvino._pyopenvino.CompiledModel``."""
    if not _core:
        _core.append(CoreBase())  # not the program's, whose properties and cache are for its own models
    config = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    return _core[0].compile_model(build_placeholder(model), "CPU", config)


def build_placeholder(model: Any) -> Any:
    """Return the graph of a placeholder, with the ports of ``model`` in their order."""
    from openvino import opset13 as o

    inputs = []
    for port in model.inputs:
        node = o.parameter(port.get_partial_shape(), port.get_element_type(), name=_name(port))
        node.output(0).tensor.set_names(port.get_names())
        _copy_layout(port, node.output(0))
        inputs.append(node)
    values: dict[frozenset[str], Any] = {}
    results: list[Any] = []
    sinks: list[Any] = []
    for port in model.outputs:
        names = frozenset(port.get_names())
        if not names or names not in values:  # a tensor may be two results
            if port.get_partial_shape().is_static:
                value = _static(port)
            else:
                value, sink = _dynamic(port, f"output {len(sinks)}")
                sinks.append(sink)
            values[names] = o.convert(value, port.get_element_type().get_type_name())
            values[names].output(0).tensor.set_names(port.get_names())
        result = o.result(values[names])
        result.set_friendly_name(_name(port))
        _copy_layout(port, result.output(0))
        results.append(result)
    return ModelBase(results, sinks, inputs, model.get_friendly_name())


def _static(port: Any) -> Any:
    from openvino import opset13 as o

    return o.broadcast(o.constant(np.float32(np.nan)), o.constant(np.array(port.get_shape(), np.int64)))


def _dynamic(port: Any, name: str) -> tuple[Any, Any]:
    """Return a node of the shape of a port, and its end: a state, because only that may have bounds of each size."""
    from openvino import opset6 as o
    from openvino.op.util import Variable, VariableInfo

    info = VariableInfo()
    info.data_shape = port.get_partial_shape()
    info.data_type = Type.f32
    info.variable_id = name
    variable = Variable(info)
    value = o.read_value(variable)
    return o.add(value, o.constant(np.float32(np.nan))), o.assign(value, variable)


def _name(port: Any) -> str:
    name: str = port.get_node().get_friendly_name()
    return name


def _copy_layout(port: Any, target: Any) -> None:
    from openvino._pyopenvino import layout_helpers

    layout = layout_helpers.get_layout(port)
    if not layout.empty:
        layout_helpers.set_layout(target, layout)
