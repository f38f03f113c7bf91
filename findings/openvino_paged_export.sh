#!/usr/bin/env bash
# OpenVINO 2026.4.1, CPU: a compiled model with PagedAttentionExtension is exported, and cannot be imported.
#
# Expected: import_model takes what export_model has written, as for other models.
# Seen: it raises RuntimeError: the node has lost k_head_size and num_k_heads, which paged_attention_transformation keeps in the
# node's runtime information. The plain model, compiled and exported in the same way, is imported.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q openvino==2026.4.1
cat > "$folder/run.py" <<'PYTHON'
import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino import _offline_transformations as offline

HEADS, SIZE, VOCABULARY = 2, 16, 64
random = np.random.default_rng(0)


def weights(*shape):
    return ops.constant((random.standard_normal(shape) * 0.1).astype(np.float32))


def parameter(name, kind):
    node = ops.parameter([-1] if name == "beam_idx" else [-1, -1], kind)
    node.set_friendly_name(name)
    node.output(0).set_names({name})
    return node


def decoder():
    """One layer of attention with a state for keys and one for values, as exporters write decoders."""
    names = ("input_ids", "attention_mask", "position_ids")
    ids, mask, positions = (parameter(name, ov.Type.i64) for name in names)
    beams = parameter("beam_idx", ov.Type.i32)
    width = HEADS * SIZE
    x = ops.add(ops.gather(weights(VOCABULARY, width), ids, 0), ops.gather(weights(VOCABULARY, width), positions, 0))

    def heads():
        rows = ops.matmul(x, weights(width, width), False, True)
        return ops.transpose(ops.reshape(rows, [0, 0, HEADS, SIZE], True), [0, 2, 1, 3])

    query, key, value = heads(), heads(), heads()
    batch = ops.gather(ops.shape_of(ids), [0], 0)
    sinks, whole = [], []
    for role, new in (("key", key), ("value", value)):
        name = f"past_key_values.0.{role}present.0.{role}"
        empty = ops.broadcast(ops.constant(np.float32(0)), ops.concat([batch, np.array([HEADS, 0, SIZE])], 0))
        before = ops.read_value(empty, name, ov.Type.f32, ov.PartialShape([-1, HEADS, -1, SIZE]))
        whole.append(ops.concat([ops.gather(before, beams, 0), new], 2))
        sinks.append(ops.assign(whole[-1], name))
    seen = ops.equal(ops.unsqueeze(ops.unsqueeze(mask, 1), 1), np.int64(1))
    bias = ops.select(seen, np.float32(0), np.float32(-1e9))
    found = ops.scaled_dot_product_attention(query, *whole, bias, causal=False)
    rows = ops.reshape(ops.transpose(found, [0, 2, 1, 3]), [0, 0, width], True)
    rows = ops.matmul(rows, weights(width, width), False, True)
    logits = ops.result(ops.matmul(rows, weights(VOCABULARY, width), False, True))
    logits.output(0).set_names({"logits"})
    return ov.Model([logits], sinks, [ids, mask, positions, beams], "tiny")


core = ov.Core()


def attempt(model):
    blob = core.compile_model(model, "CPU").export_model().getvalue()
    try:
        core.import_model(blob, "CPU")
    except RuntimeError as error:
        return [line for line in str(error).splitlines() if line.strip()][-1]
    return "imported"


plain = attempt(decoder())
model = decoder()
offline.paged_attention_transformation(model)
paged = attempt(model)
print(ov.__version__)
print("plain:", plain)
print("paged:", paged)
assert plain == "imported" and "k_head_size and num_k_heads are required" in paged, "the behaviour has changed"
PYTHON
"$folder/venv/bin/python" "$folder/run.py"
