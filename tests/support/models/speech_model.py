"""Writes a tiny encoder-decoder model as optimum exports one for speech: two IRs, the decoder with states; random weights."""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13 as ops

BANDS, COLUMNS, FRAMES = 4, 20, 10
VOCAB, HIDDEN, HEADS, LAYERS, POSITIONS = 50, 16, 2, 2, 64
HEAD_DIM = HIDDEN // HEADS
ENCODER, DECODER = "openvino_encoder_model", "openvino_decoder_model"


class Writer:
    """Makes the nodes of a model with random weights."""

    def __init__(self, seed):
        self._rng = np.random.default_rng(seed)

    def weights(self, *shape):
        return ops.constant((self._rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32))

    def linear(self, values, size=HIDDEN):
        return ops.matmul(values, self.weights(size, values.get_output_partial_shape(0)[-1].get_length()), False, True)

    def heads(self, values):
        split = ops.reshape(values, np.array([0, -1, HEADS, HEAD_DIM]), special_zero=True)
        return ops.transpose(split, np.array([0, 2, 1, 3]))

    def attention(self, query, key, value, mask):
        found = ops.scaled_dot_product_attention(self.heads(query), key, value, mask, np.float32(HEAD_DIM**-0.5))
        joined = ops.reshape(ops.transpose(found, np.array([0, 2, 1, 3])), np.array([0, -1, HIDDEN]), special_zero=True)
        return self.linear(joined)


def named(node, name):
    node.set_friendly_name(name)
    node.output(0).set_names({name})
    return node


def write_encoder(folder, seed=0, num_layers=0):
    """Features ``[batch, BANDS, COLUMNS]`` → hidden states ``[batch, FRAMES, HIDDEN]``. Layers may follow, which are alike."""
    writer = Writer(seed)
    features = named(ops.parameter([-1, BANDS, COLUMNS], np.float32), "input_features")
    kernel = writer.weights(HIDDEN, BANDS, 3)
    found = ops.convolution(features, kernel, [2], [1], [1], [1])
    hidden = writer.linear(ops.tanh(ops.transpose(found, np.array([0, 2, 1]))))
    for _ in range(num_layers):
        hidden = ops.add(hidden, writer.linear(ops.tanh(writer.linear(hidden, 2 * HIDDEN))))
    model = ov.Model([named(ops.result(hidden), "last_hidden_state")], [features], "encoder")
    ov.save_model(model, str(folder / f"{ENCODER}.xml"), compress_to_fp16=False)


def write_decoder(folder, seed=1, cross_mask=0.0, vocab=VOCAB):
    """Tokens, hidden states of the encoder and ``beam_idx`` → logits; ``cross_mask`` is added to the scores of every frame."""
    writer = Writer(seed)
    ids = named(ops.parameter([-1, -1], np.int64), "input_ids")
    hidden = named(ops.parameter([-1, -1, HIDDEN], np.float32), "encoder_hidden_states")
    beams = named(ops.parameter([-1], np.int32), "beam_idx")
    batch = ops.gather(ops.shape_of(ids), ops.constant([0]), ops.constant(0))
    empty = ops.broadcast(ops.constant(np.float32(0)), ops.concat([batch, ops.constant([HEADS, 0, HEAD_DIM])], 0))
    values = ops.gather(writer.weights(vocab, HIDDEN), ids, ops.constant(0))
    sinks, mask = [], None
    for layer in range(LAYERS):
        states = []
        for role in ("key", "value"):
            new = writer.heads(writer.linear(values))
            variable = f"past.{layer}.{role}"
            read = ops.read_value(empty, variable, np.float32, ov.PartialShape([-1, HEADS, -1, HEAD_DIM]))
            grown = ops.concat([ops.gather(read, beams, ops.constant(0)), new], 2)
            sinks.append(ops.assign(grown, variable))
            states.append(grown)
        if layer == 0:
            total = ops.gather(ops.shape_of(states[0]), ops.constant(2), ops.constant(0))
            rows = ops.gather(ops.shape_of(ids), ops.constant(1), ops.constant(0))
            first = ops.subtract(total, rows)
            positions = ops.range(first, total, ops.constant(np.int64(1)), "i64")
            values = ops.add(values, ops.gather(writer.weights(POSITIONS, HIDDEN), positions, ops.constant(0)))
            columns = ops.range(ops.constant(np.int64(0)), total, ops.constant(np.int64(1)), "i64")
            hides = ops.greater(ops.unsqueeze(columns, ops.constant(0)), ops.unsqueeze(positions, ops.constant(1)))
            mask = ops.unsqueeze(ops.select(hides, np.float32(-65504), np.float32(0)), np.array([0, 1]))
        values = ops.add(values, writer.attention(writer.linear(values), *states, mask))
        crossed = []
        for role in ("key", "value"):
            computed = writer.heads(writer.linear(hidden))
            name = f"{100 + layer}{role}"
            read = ops.read_value(computed, name, np.float32, ov.PartialShape([-1, HEADS, -1, HEAD_DIM]))
            sinks.append(ops.assign(read, name))
            crossed.append(read)
        visible = ops.constant(np.full((1, 1, 1, 1), cross_mask, np.float32))
        values = ops.add(values, writer.attention(writer.linear(values), *crossed, visible))
        values = ops.add(values, writer.linear(ops.tanh(writer.linear(values, 2 * HIDDEN))))
    logits = named(ops.result(writer.linear(values, vocab)), "logits")
    model = ov.Model([logits], sinks, [ids, hidden, beams], "decoder")
    ov.save_model(model, str(folder / f"{DECODER}.xml"), compress_to_fp16=False)


def write_speech_model(folder, seed=0, vocab=VOCAB, num_layers=0):
    """Write both IRs into a folder, and return it. ``num_layers``: those of the encoder."""
    write_encoder(folder, seed, num_layers)
    write_decoder(folder, seed + 1, vocab=vocab)
    return folder


def features(seed):
    """A window ``[BANDS, COLUMNS]`` f32."""
    return np.random.default_rng(seed).standard_normal((BANDS, COLUMNS)).astype(np.float32)


class OriginalSpeech:
    """The exported IRs, run as they are, in f32."""

    def __init__(self, folder):
        core, exact = ov.Core(), {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        self._encoder = core.compile_model(folder / f"{ENCODER}.xml", "CPU", exact)
        self._decoder = core.compile_model(folder / f"{DECODER}.xml", "CPU", exact)

    def logits(self, window, tokens):
        """Return the logits ``[tokens, vocab]`` of a whole sequence about a window."""
        hidden = self._encoder(window[None])[0]
        request = self._decoder.create_infer_request()
        feeds = {"input_ids": np.array([tokens]), "encoder_hidden_states": hidden, "beam_idx": np.zeros(1, np.int32)}
        return np.array(request.infer(feeds)[0][0])

    def answer(self, window, prompt, count):
        """Return the ``count`` most likely tokens after a prompt."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(window, tokens)[-1].argmax()))
        return tokens[len(prompt) :]
