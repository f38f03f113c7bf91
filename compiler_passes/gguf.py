"""Makes a stateful decoder of the graph that OpenVINO's GGUF frontend gives: the form in which optimum exports models.

That graph has keys and values, masks, positions and rows of the KV slots as inputs, and computes attention in f16. The result
has the inputs ``input_ids``, ``attention_mask``, ``position_ids`` and ``beam_idx``, keeps keys and values as states ``[1, heads,
slots, size]``, and computes in f32.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from staticllm.errors import UnsupportedModelError
from staticllm.ports import ATTENTION_MASK, BEAM_IDX, INPUT_IDS, LOGITS, POSITION_IDS

from .graph.step_graph import consumers, redirect

STAGE = "gguf"
TOKENS, POSITIONS, ROWS, OUT_ROWS = "inp_tokens", "inp_pos", "inp_kv_idx", "inp_out_ids"
MASK, WINDOW_MASK = "self_kq_mask", "self_kq_mask_swa"
UNUSED = ("token_len_per_seq",)
_CACHE = re.compile(r"cache_[kv]_l\d+")


class _Graph:
    """The frontend's graph, its inputs by name, and the inputs that replace them."""

    def __init__(self, model: ov.Model) -> None:
        self.model = model
        self.old = {min(port.get_names()): port.get_node() for port in model.inputs}
        self.new = {
            name: ops.parameter([1, -1], ov.Type.i64, name=name) for name in (INPUT_IDS, ATTENTION_MASK, POSITION_IDS)
        }
        self.new[BEAM_IDX] = ops.parameter([-1], ov.Type.i32, name=BEAM_IDX)
        for name, parameter in self.new.items():
            parameter.output(0).set_names({name})

    def replace_input(self, name: str, value: ov.Output) -> None:
        """Let all readers of an input read a value of its type, and remove the input."""
        parameter = self.old.pop(name, None)
        if parameter is not None:
            redirect(parameter.output(0), ops.convert(value, parameter.get_element_type().get_type_name()).output(0))
            self.model.remove_parameter(parameter)


def make_stateful(model: ov.Model, window: int | None = None, scale: float | None = None) -> None:
    """Change a model of the frontend in place.

    Args:
        window: The tokens that layers with sliding windows see; all layers have one if the model does not tell them
            apart.
        scale: By what the products of queries and keys are multiplied, which the model has in f16; None keeps that.

    Raises:
        UnsupportedModelError: the graph has inputs that no decoder has, or windows of an unknown length.
    """
    graph = _Graph(model)
    has_windows = WINDOW_MASK in graph.old and _is_used(graph.old[WINDOW_MASK])
    if has_windows and window is None:
        raise UnsupportedModelError(
            STAGE, "the model has layers with sliding windows, and the file does not say how long they are"
        )
    model.add_parameters(list(graph.new.values()))
    _keep_precision(model)
    if scale is not None:
        _scale_attention(model, scale)
    for name in [name for name in graph.old if _CACHE.fullmatch(name)]:
        _hold(graph, name)
    _give_all_rows(graph)
    flat = [1, 1, 1, -1]
    graph.replace_input(TOKENS, ops.reshape(graph.new[INPUT_IDS], flat, False).output(0))
    graph.replace_input(POSITIONS, ops.reshape(graph.new[POSITION_IDS], flat, False).output(0))
    graph.replace_input(MASK, _mask(graph, None if has_windows else window).output(0))
    if WINDOW_MASK in graph.old:
        graph.replace_input(WINDOW_MASK, _mask(graph, window).output(0))
    _name_logits(model)
    for name in (ROWS, OUT_ROWS, *UNUSED):
        parameter = graph.old.pop(name, None)
        if parameter is not None:
            model.remove_parameter(parameter)
    if graph.old:
        raise UnsupportedModelError(STAGE, f"the model has inputs that no decoder has: {', '.join(sorted(graph.old))}")
    model.validate_nodes_and_infer_types()


def _is_used(node: ov.Node) -> bool:
    """Return whether anything but conversions reads a node."""
    readers = consumers(node.output(0))
    return any(reader.get_type_name() != "Convert" or _is_used(reader) for reader in readers)


def _keep_precision(model: ov.Model) -> None:
    """Remove what rounds numbers to f16 that tokens decide: queries, keys, values and masks."""
    weights = set[str]()
    for node in model.get_ordered_ops():
        inputs = [value.get_node().get_friendly_name() for value in node.input_values()]
        if node.get_type_name() == "Constant" or (inputs and weights.issuperset(inputs)):
            weights.add(node.get_friendly_name())
        elif node.get_type_name() == "Convert" and node.get_output_element_type(0) == ov.Type.f16:
            _widen_constants(consumers(node.output(0)))
            redirect(node.output(0), node.input_value(0))
    for parameter in model.get_parameters():
        if parameter.get_element_type() == ov.Type.f16:
            parameter.set_element_type(ov.Type.f32)
    model.validate_nodes_and_infer_types()


def _widen_constants(nodes: Iterable[ov.Node]) -> None:
    """Store constants in f16 that nodes use as f32, such as the scale of attention."""
    for node in nodes:
        for port in node.inputs():
            constant = port.get_source_output().get_node()
            if constant.get_type_name() == "Constant" and constant.get_element_type() == ov.Type.f16:
                port.replace_source_output(ops.constant(constant.data.astype(np.float32)).output(0))


def _scale_attention(model: ov.Model, scale: float) -> None:
    """Multiply the products of queries and keys by an exact number."""
    for node in model.get_ordered_ops():
        if node.get_type_name() == "ScaledDotProductAttention" and node.get_input_size() > 4:
            node.input(4).replace_source_output(ops.constant(np.float32(scale)).output(0))
        elif node.get_type_name() == "Tanh":
            _scale_capped(node, scale)


def _scale_capped(tanh: ov.Node, scale: float) -> None:
    """Do so before scores are capped: they are ``cap * tanh(scale / cap * product)``."""
    scaled = tanh.input_value(0).get_node()
    products = scaled.input_value(0).get_node()
    if products.get_type_name() == "MatMul" and all(
        value.get_node().get_type_name() != "Constant" and value.get_partial_shape().rank.get_length() == 4
        for value in products.input_values()
    ):
        (capped,) = consumers(tanh.output(0))
        cap = capped.input_value(1).get_node().data.reshape(-1)[0]
        scaled.input(1).replace_source_output(ops.constant(np.float32(scale / cap)).output(0))


def _hold(graph: _Graph, name: str) -> None:
    """Hold keys or values as a state ``[1, heads, slots, size]``, to which a call appends its rows."""
    parameter = graph.old.pop(name)
    heads, size = (parameter.get_partial_shape()[axis].get_length() for axis in (2, 3))
    (update,) = consumers(parameter.output(0))
    kind = parameter.get_element_type()
    zero = ops.constant(np.zeros([1, heads, 0, size], np.float32))
    info = ov.op.util.VariableInfo()
    info.data_shape = ov.PartialShape([1, heads, -1, size])
    info.data_type = kind
    info.variable_id = name
    variable = ov.op.util.Variable(info)
    read = ops.read_value(ops.convert(zero, kind.get_type_name()), variable)
    past = ops.gather(read, graph.new[BEAM_IDX], ops.constant(0))
    rows = ops.reshape(update.input_value(2), [1, -1, heads, size], False)
    concat = ops.concat([past, ops.transpose(rows, [0, 2, 1, 3])], 2)
    graph.model.add_variables([variable])
    graph.model.add_sinks([ops.assign(concat, variable)])
    for result in [each for each in consumers(update.output(0)) if each.get_type_name() == "Result"]:
        graph.model.remove_result(result)
    for reader in consumers(update.output(0)):
        _read_by_heads(reader, concat, heads, size)
    redirect(update.output(0), ops.transpose(concat, [0, 2, 1, 3]).output(0))
    graph.model.remove_parameter(parameter)


def _read_by_heads(reader: ov.Node, held: ov.Node, heads: int, size: int) -> None:
    """Let attention read keys or values by heads, as they are held, if a reader only repeats and transposes what it reads.

    That is ``[1, slots, heads, size]``. Each head may be repeated for several heads of queries, which later passes find in the
    form of other exports.
    """
    chain = [reader]
    while chain[-1].get_type_name() in ("Unsqueeze", "Broadcast", "Reshape"):
        following = consumers(chain[-1].output(0))
        if len(following) != 1:
            return
        chain += following
    kinds = tuple(node.get_type_name() for node in chain)
    if kinds not in (("Transpose",), ("Unsqueeze", "Broadcast", "Reshape", "Transpose")):
        return
    order = chain[-1].input_value(1).get_node()
    if order.get_type_name() != "Constant" or order.data.tolist() != [0, 2, 1, 3]:
        return
    result = held
    if len(chain) > 1:
        repeated = chain[0].get_output_partial_shape(0)
        copies = chain[2].get_output_partial_shape(0)[2].get_length() // heads
        if len(repeated) != 5 or repeated[3] != 1:
            return
        target = ops.constant([1, 1, copies, 1, 1])
        wide = ops.broadcast(ops.unsqueeze(held, ops.constant(2)), target, broadcast_spec="BIDIRECTIONAL")
        result = ops.reshape(wide, [1, heads * copies, -1, size], False)
    redirect(chain[-1].output(0), result.output(0))


def _give_all_rows(graph: _Graph) -> None:
    """Remove the gathers of the rows that get logits: all rows do, and the passes choose."""
    rows = graph.old.get(OUT_ROWS)
    for squeeze in consumers(rows.output(0)) if rows is not None else ():
        for gather in consumers(squeeze.output(0)):
            redirect(gather.output(0), ops.unsqueeze(gather.input_value(0), ops.constant(0)).output(0))


def _mask(graph: _Graph, window: int | None) -> ov.Node:
    """Return the additive mask ``[1, 1, rows, slots]``: a row sees no later token, none before its window, and no padding."""
    slots = _size(graph.new[ATTENTION_MASK])
    first = ops.subtract(slots, _size(graph.new[INPUT_IDS]))
    zero = ops.constant(np.int64(0))
    one = ops.constant(np.int64(1))
    keys = ops.unsqueeze(ops.range(zero, slots, one, "i64"), ops.constant([0, 1, 2]))
    queries = ops.unsqueeze(ops.range(first, slots, one, "i64"), ops.constant([0, 1, 3]))
    padding = ops.unsqueeze(ops.convert(graph.new[ATTENTION_MASK], "boolean"), ops.constant([1, 2]))
    seen = ops.logical_and(ops.less_equal(keys, queries), padding)
    if window is not None:
        seen = ops.logical_and(seen, ops.greater(keys, ops.subtract(queries, ops.constant(np.int64(window)))))
    return ops.select(seen, ops.constant(np.float32(0)), ops.constant(np.float32(-np.inf)))


def _size(tokens: ov.Node) -> ov.Node:
    """Return the number of tokens in ``[1, tokens]`` as a scalar."""
    return ops.gather(ops.shape_of(tokens), ops.constant(1), ops.constant(0))


def _name_logits(model: ov.Model) -> None:
    """Name the logits, and give them the shape ``[1, rows, vocabulary]``, from the hidden states before the head on."""
    (result,) = model.get_results()
    head = result.input_value(0).get_node()
    while head.get_type_name() != "MatMul":
        computed = [value.get_node() for value in head.input_values() if value.get_node().get_type_name() != "Constant"]
        if len(computed) != 1:
            raise UnsupportedModelError(
                STAGE, f"the logits come from {head.get_friendly_name()!r}, which is no product"
            )
        head = computed[0]
    size = head.input_value(0).get_partial_shape()[3].get_length()
    head.input(0).replace_source_output(ops.reshape(head.input_value(0), [1, -1, size], False).output(0))
    result.input_value(0).set_names({LOGITS})
