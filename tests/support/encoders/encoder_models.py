"""Tiny encoders for tests: archives of exported models, graphs of our own, and texts run alone and packed."""

from __future__ import annotations

import json
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai
from openvino import opset13 as ops

from staticllm import demo_model_path
from staticllm.core import EncoderVariant
from staticllm.devices import get_core
from staticllm.pipelines.diagnostics.reference import EXACT
from staticllm.ports import encoder_shape_of

ARCHIVES = Path(__file__).resolve().parents[2] / "_encoders"
VOCABULARY, WIDTH, HEADS = 100, 32, 4
HIDDEN = -65504.0


def unpack(name, folder):
    """Unpack an archive into a folder, and return the path of the model's .xml."""
    with zipfile.ZipFile(ARCHIVES / f"{name}.zip") as archive:
        archive.extractall(folder)
    return folder / "openvino_model.xml"


@dataclass(frozen=True)
class Placed:
    """A text in a call: its tokens, its sequence and first row, and token types."""

    ids: np.ndarray
    sequence: int
    start: int
    types: np.ndarray

    @property
    def rows(self):
        return slice(self.start, self.start + len(self.ids))


class Alone:
    """The model as it was exported: one text per call, pooled and normalised by numpy.

    Each length has a static program: OpenVINO 2026.4's fused attention without a mask computes wrong values in a dynamic program
    on a CPU for many tokens after one. With as many tokens as heads, only a dynamic one is right.
    """

    def __init__(self, model):
        self.model, self.programs = model, {}

    def program_of(self, length):
        if length not in self.programs:
            model = self.model.clone()
            if length != HEADS:
                model.reshape({port: [1, length] for port in model.inputs})
            self.programs[length] = get_core().compile_model(model, "CPU", EXACT)
        return self.programs[length]

    def __call__(self, ids, pooling, types=None):
        program = self.program_of(len(ids))
        ids = np.asarray(ids)[None]
        feeds = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "token_type_ids": np.zeros_like(ids) if types is None else types[None],
        }
        output = program({name: feeds[name] for port in program.inputs for name in port.get_names() & set(feeds)})
        values = output[0][0]
        return values if values.ndim == 1 else unit(pooled(values, pooling))


def pooled(states, pooling):
    return {"mean": states.mean(axis=0), "first": states[0], "last": states[-1]}[pooling]


def unit(vector):
    return vector / np.linalg.norm(vector)


class Packed:
    """A program of one variant, and the host's part of the contract: ids, positions, masks and pooling."""

    def __init__(self, lowered, variant):
        self.shape, self.variant = lowered.shape, variant
        self.program = get_core().compile_model(lowered.specialise(variant), "CPU", EXACT)

    def _positions(self, ids):
        found, next_one = [], self.shape.first_position
        for id in ids:
            is_skipped = id == self.shape.skipped_id
            found.append(self.shape.first_position - 1 if is_skipped else next_one)
            next_one += not is_skipped
        return found

    def feeds(self, texts, pooling, idle=0):
        variant, shape = self.variant, self.shape
        size = variant.batch, variant.rows
        ids, positions, types = np.full(size, idle), np.full(size, shape.first_position), np.zeros(size, np.int64)
        group = -1 - np.tile(np.arange(variant.rows), (variant.batch, 1))  # idle rows see themselves
        pool = np.zeros((variant.texts, variant.batch * variant.rows), np.float32)
        for index, text in enumerate(texts):
            place = text.sequence, text.rows
            length = len(text.ids)
            ids[place], types[place], group[place] = text.ids, text.types, index
            positions[place] = self._positions(text.ids)
            first = text.sequence * variant.rows + text.start
            weights = (
                np.full(length, 1 / length) if pooling == "mean" else np.eye(length)[0 if pooling == "first" else -1]
            )
            pool[index, first : first + length] = weights
        feeds = {"input_ids": ids, "position_ids": positions, "token_type_ids": types, "pool": pool}
        row = np.arange(variant.rows)
        for kind in shape.masks:
            sees = np.vectorize(kind.sees)(row[None, :] - row[:, None])
            seen = (group[:, :, None] == group[:, None, :]) & sees
            feeds[kind.port_name] = np.where(seen, 0, HIDDEN).astype(np.float32)[:, None]
        wanted = {name for port in self.program.inputs for name in port.get_names()}
        feeds = {name: value for name, value in feeds.items() if name in wanted}
        for name, value in feeds.items():
            assert value.shape == encoder_shape_of(name, shape, variant)
        return feeds

    def run(self, feeds):
        return np.array(self.program(feeds)[0])

    def __call__(self, texts, pooling, idle=0):
        return self.run(self.feeds(texts, pooling, idle))[: len(texts)]


def some_texts(rng, shape, variant):
    """Fill a call at random: texts one after another, at most ``variant.texts``, one of them with a single token.

    If there are several sequences, a text fills all rows of the first. A model that is not packable gets one per sequence.
    """
    found = []
    for sequence in range(variant.batch):
        start, full = 0, sequence == 0 and variant.batch > 1
        while start < variant.rows and len(found) < variant.texts:
            room = variant.rows - start
            length = variant.rows if full else 1 if start == 0 else int(rng.integers(1, room + 1))
            found.append(a_text(rng, length, sequence, start))
            start += length
            if not shape.is_packable:
                break
    return found


def a_text(rng, length, sequence=0, start=0):
    types = (np.arange(length) >= length // 2).astype(np.int64)
    return Placed(rng.integers(5, VOCABULARY, length), sequence, start, types)


def a_variant(rows=24, batch=1, texts=6):
    return EncoderVariant(batch, rows, texts)


class TinyEncoder:
    """A graph of our own: layers of attention with whatever ``on_scores`` and ``on_hidden`` put into it.

    ``form``: how attention is written: ``plain``, ``flat`` (heads beside the batch), ``fused`` or ``fused causal`` (both without
    a mask).
    ``on_scores(scores, rows)`` and ``on_hidden(hidden, rows)`` return their first argument changed; ``rows`` is a scalar i64.
    """

    def __init__(self, on_scores=None, on_hidden=None, layers=2, form="plain", vocabulary=VOCABULARY):
        self.on_scores, self.on_hidden, self.layers = on_scores, on_hidden, layers
        self.form, self.vocabulary = form, vocabulary

    def model(self):
        self.rng = np.random.default_rng(0)
        ids, mask = (self._input(name) for name in ("input_ids", "attention_mask"))
        rows = ops.gather(ops.shape_of(ids), ops.constant(1), ops.constant(0))
        shown = ops.unsqueeze(ops.convert(mask, "f32"), np.array([1, 2]))
        padding = ops.multiply(ops.subtract(ops.constant(np.float32(1)), shown), ops.constant(np.finfo(np.float32).min))
        hidden = ops.gather(self._weight(self.vocabulary, WIDTH), ids, ops.constant(0))
        for _ in range(self.layers):
            hidden = self._layer(hidden, padding, rows)
            hidden = self.on_hidden(hidden, rows) if self.on_hidden else hidden
        result = ops.result(hidden)
        result.output(0).set_names({"last_hidden_state"})
        model = ov.Model([result], [ids, mask])
        model.validate_nodes_and_infer_types()
        return model

    def _layer(self, hidden, padding, rows):
        query, key, value = (self._heads(hidden) for _ in range(3))
        heads = ops.transpose(self._attention(query, key, value, padding, rows), np.array([0, 2, 1, 3]))
        joined = ops.reshape(heads, np.array([0, 0, WIDTH]), special_zero=True)
        hidden = ops.add(hidden, ops.matmul(joined, self._weight(WIDTH, WIDTH), False, False))
        inner = ops.gelu(ops.matmul(hidden, self._weight(WIDTH, 48), False, False), "erf")
        hidden = ops.add(hidden, ops.matmul(inner, self._weight(48, WIDTH), False, False))
        return ops.mvn(hidden, np.array([-1]), True, 1e-6, "inside_sqrt")

    def _attention(self, query, key, value, padding, rows):
        if self.form.startswith("fused"):
            return ops.scaled_dot_product_attention(query, key, value, causal=self.form.endswith("causal"))
        scores = ops.multiply(ops.matmul(query, key, False, True), ops.constant(np.float32((WIDTH // HEADS) ** -0.5)))
        scores = ops.add(self.on_scores(scores, rows) if self.on_scores else scores, padding)
        if self.form == "plain":
            return ops.matmul(ops.softmax(scores, axis=-1), value, False, False)
        flat = [ops.reshape(x, ops.concat([np.array([-1]), tail(x)], 0), special_zero=False) for x in (scores, value)]
        joined = ops.matmul(ops.softmax(flat[0], axis=-1), flat[1], False, False)
        return ops.reshape(joined, ops.shape_of(value), special_zero=False)

    def _heads(self, hidden):
        apart = ops.reshape(
            ops.matmul(hidden, self._weight(WIDTH, WIDTH), False, False),
            np.array([0, 0, HEADS, WIDTH // HEADS]),
            special_zero=True,
        )
        return ops.transpose(apart, np.array([0, 2, 1, 3]))

    def _weight(self, *shape):
        return ops.constant((self.rng.normal(size=shape) * 0.3).astype(np.float32))

    def _input(self, name):
        node = ops.parameter(ov.PartialShape([-1, -1]), ov.Type.i64)
        node.set_friendly_name(name)
        node.output(0).set_names({name})
        return node


def tail(value):
    """Return the last two sizes of a value."""
    return ops.gather(ops.shape_of(value), ops.constant(np.array([2, 3])), ops.constant(0))


def a_range(rows):
    """Return 0 … rows - 1 in f32."""
    return ops.convert(ops.range(ops.constant(np.int64(0)), rows, ops.constant(np.int64(1)), "i64"), "f32")


def by_distance(bias):
    """Return an ``on_scores`` that adds ``bias(key - query)``, ``[heads, S, S]``."""

    def add(scores, rows):
        places = a_range(rows)
        distance = ops.subtract(ops.unsqueeze(places, ops.constant(0)), ops.unsqueeze(places, ops.constant(1)))
        return ops.add(scores, bias(distance))

    return add


def slopes(factor=1.0):
    return ops.constant((factor * 2.0 ** -np.arange(1, HEADS + 1)).astype(np.float32).reshape(HEADS, 1, 1))


def symmetric_alibi(distance):
    return ops.multiply(ops.negative(ops.abs(distance)), slopes())


def alibi_of_keys(scores, rows):
    """The bias as BLOOM writes it: by the key's place alone, which differs from the distance by a number per query."""
    return ops.add(scores, ops.multiply(a_range(rows), slopes(0.25)))


def encoder_directory(folder):
    """Write an encoder with the demo model's tokenizer into a folder, and its pooling and prompts. Return the folder."""
    for name in ("openvino_tokenizer", "openvino_detokenizer"):
        for suffix in ("xml", "bin"):
            shutil.copy(demo_model_path() / f"{name}.{suffix}", folder)
    vocabulary = genai.Tokenizer(demo_model_path()).get_vocab()
    model = TinyEncoder(by_distance(symmetric_alibi), vocabulary=max(vocabulary.values()) + 1).model()
    ov.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    (folder / "1_Pooling").mkdir()
    write(folder / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False})
    write(folder / "config_sentence_transformers.json", {"prompts": {"query": "query: ", "document": ""}})
    write(folder / "sentence_bert_config.json", {"max_seq_length": 128})
    return folder


def write(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")


def number(value):
    return ops.constant(np.float32(value))


def hidden_where(condition):
    return ops.select(condition, ops.constant(np.float32(-1e9)), number(0))


def window_before_and_after(before, after):
    def bias(distance):
        early, late = ops.less(distance, number(-before)), ops.greater(distance, number(after))
        return hidden_where(ops.logical_or(early, late))

    return by_distance(bias)


def check_equal(encoder, lowered, pooling="mean", tolerance=2e-6, **sizes):
    alone = Alone(encoder.model())
    rng = np.random.default_rng(2)
    for variant in (a_variant(texts=6, **sizes), a_variant(batch=4, texts=16, **sizes)):
        texts = some_texts(rng, lowered.shape, variant)
        expected = np.array([alone(text.ids, pooling) for text in texts])
        assert np.abs(Packed(lowered, variant)(texts, pooling) - expected).max() <= tolerance
