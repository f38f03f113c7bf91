#!/usr/bin/env bash
# OpenVINO 2026.4.1, CPU, Linux: compiling a decoder with states leaves a thread in the process, each time.
#
# Expected: a compiled model that was dropped gives back what it took, as it does after the transformation to paged attention.
# Seen: each compile_model of the decoder leaves one thread more, though nothing ran and no reference is left. The same decoder
# without states leaves none.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q openvino==2026.4.1
cat > "$folder/run.py" <<'PYTHON'
import os
import time

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


def threads_after(make, times):
    counts = []
    for _ in range(times):
        compiled = core.compile_model(make(), "CPU")
        del compiled
        time.sleep(0.5)
        counts.append(len(os.listdir("/proc/self/task")))
    return counts


def without_states():
    model = decoder()
    offline.paged_attention_transformation(model)
    return model


threads_after(without_states, 2)
plain = threads_after(without_states, 5)
stateful = threads_after(decoder, 6)
print(ov.__version__)
print("threads after each compilation without states:", plain)
print("threads after each compilation with states:", stateful)
assert plain[-1] <= plain[0] and stateful[-1] - stateful[0] >= 5, "the behaviour has changed"
PYTHON
"$folder/venv/bin/python" "$folder/run.py"
