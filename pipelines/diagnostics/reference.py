"""Runs original models as they were exported; every program of ours must agree with them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.core import EncoderShape, Pooling
from staticllm.devices import get_core, kind
from staticllm.errors import ModelError, last_line, quoted
from staticllm.model_dir import read_model
from staticllm.ports import ATTENTION_MASK, BEAM_IDX, CACHE_POSITION, INPUT_IDS, LOGITS, POSITION_IDS, TOKEN_TYPE_IDS

from ...compiler_passes.graph.step_graph import named_result
from ...compiler_passes.model_kind import check_kind
from ...compiler_passes.shapes.add_pooling import Dense
from ...compiler_passes.shapes.select_logits import find_head
from ...compiler_passes.shapes.select_output import HIDDEN_STATES
from ..embedding.encoder_kind import EncoderJob
from ..embedding.packing.encoder_buffers import Vectors
from ..embedding.packing.tokenized_text import TokenizedText

EXACT: Mapping[str, Any] = MappingProxyType(
    {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
)
"""CPU properties that add no rounding to that of the model itself."""
_ACTIVATIONS: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "silu": lambda x: x / (1 + np.exp(-x)),
}


def exact_for(device: str) -> dict[str, Any]:
    """Return the properties of programs of ours that are compared with an original: in f32 on a CPU, else the device's own."""
    return {name: value for name, value in EXACT.items() if kind(device) == "CPU" and name != "KV_CACHE_PRECISION"}


class StatefulReference:
    """A stateful IR that runs on the CPU, one conversation at a time, in f32 unless ``properties`` differ.

    The logits after a token are those of one call over the text up to it: the text runs again where its length exceeds one of
    ``rope_limits``, after which the model has other RoPE factors.

    Raises:
        ModelError: the directory has no causal language model, or the CPU cannot compile it.
    """

    def __init__(
        self,
        models_path: str | os.PathLike[str],
        properties: Mapping[str, Any] = EXACT,
        rope_limits: Sequence[int] = (),
    ) -> None:
        model = read_model(get_core(), Path(models_path))
        check_kind(model, Path(models_path), "decoder")
        try:
            compiled = get_core().compile_model(model, "CPU", dict(properties))
        except RuntimeError as error:
            raise ModelError(
                f"the CPU cannot compile the original in {quoted(models_path)}: {last_line(error)}"
            ) from error
        self._names = {name for port in compiled.inputs for name in port.get_names()}
        self._request = compiled.create_infer_request()
        self._limits = rope_limits
        self._length = 0
        self._text: list[int] = []

    def reset(self) -> None:
        self._request.reset_state()
        self._length = 0
        self._text.clear()

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        """Append tokens, and return the logits after each of them, ``[len(tokens), vocab]``."""
        count = len(self._text)
        ends = [limit - count for limit in self._limits if 0 < limit - count < len(tokens)]
        pieces = [tokens[start:end] for start, end in pairwise((0, *ends, len(tokens)))]
        return np.concatenate([self._piece(piece) for piece in pieces])

    def _piece(self, tokens: list[int]) -> NDArray[np.float32]:
        """Append tokens of which all or none exceed a limit, and return the logits after each of them."""
        text = [*self._text, *tokens]
        runs_again = len(self._text) in self._limits
        if runs_again:
            self.reset()
        logits = self._run(text if runs_again else tokens)
        self._text = text
        return logits[-len(tokens) :]

    def _run(self, tokens: list[int]) -> NDArray[np.float32]:
        """Run tokens in one call, if the model can, and return the logits after each of them."""
        if CACHE_POSITION in self._names and len(tokens) > 1:  # its prefill is not exact: see fix_cache_position
            return np.concatenate([self._run([token]) for token in tokens])
        past = self._length
        count = len(tokens)
        feeds = {
            INPUT_IDS: np.array([tokens], np.int64),
            ATTENTION_MASK: np.ones((1, past + count), np.int64),
            POSITION_IDS: np.arange(past, past + count, dtype=np.int64)[None],
            BEAM_IDX: np.zeros(1, np.int32),
            CACHE_POSITION: np.array([1 << 30]),
        }
        self._request.infer({name: value for name, value in feeds.items() if name in self._names})
        self._length += 0 if CACHE_POSITION in self._names else count
        logits: NDArray[np.float32] = self._request.get_tensor(LOGITS).data[0].copy()
        return logits

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """Return the ``count`` greedy tokens after a prompt; an end-of-sequence token does not stop them."""
        self.reset()
        tokens = [int(self.logits(prompt)[-1].argmax())]
        while len(tokens) < count:
            tokens.append(int(self.logits(tokens[-1:])[-1].argmax()))
        return tokens


class EncoderReference:
    """The encoder as it was exported, on the CPU in f32: one text per call, pooled by numpy.

    Each length has a static program: fused attention without a mask computes wrong values in a dynamic program for many tokens
    after one, and with as many tokens as heads only a dynamic one is right (OpenVINO 2026.4).
    """

    def __init__(self, job: EncoderJob, shape: EncoderShape, pooling: Pooling) -> None:
        self._job = job
        self._shape = shape
        self._pooling: Pooling = pooling
        self._model = job.read_model()
        self._has_states = bool(self._model.get_variables())
        if shape.output == "embeddings" and _hidden_port(self._model) is None:
            _expose_hidden_states(self._model)

    def __call__(self, text: TokenizedText) -> Vectors:
        """Return the vector or the scores of one text, ``[width]``.

        Raises:
            ModelError: the CPU cannot run the original.
        """
        ids = text.ids[None]
        feeds = {
            INPUT_IDS: ids,
            ATTENTION_MASK: np.ones_like(ids),
            TOKEN_TYPE_IDS: np.zeros_like(ids) if text.types is None else text.types[None],
            POSITION_IDS: np.arange(len(text))[None],
            BEAM_IDX: np.zeros(1, np.int32),
        }
        try:
            model = self._model.clone()
            if not self._has_states and len(text) not in self._shape.unsafe_rows:
                model.reshape({port: [1, len(text)] for port in model.inputs})
            program = get_core().compile_model(model, "CPU", dict(EXACT))
            request = program.create_infer_request()
            request.infer({name: feeds[name] for port in program.inputs for name in port.get_names() & feeds.keys()})
            values = np.array(request.get_tensor(self._output(program)).data[0], np.float32)
        except RuntimeError as error:
            raise ModelError(f"the CPU cannot run the original with {len(text)} tokens: {last_line(error)}") from error
        return values if self._shape.output == "scores" else self.vector(values)

    def _output(self, program: ov.CompiledModel) -> ov.ConstOutput:
        if self._shape.output == "scores":
            return program.output(LOGITS)
        found = _hidden_port(program)
        assert found is not None, "the constructor has exposed it"
        return found

    def vector(self, states: NDArray[np.float32]) -> Vectors:
        pooled = _pooled(states, self._pooling)
        for layer in self._job.kind.files.dense:
            pooled = _dense(layer, pooled)
        length = np.linalg.norm(pooled) if self._job.kind.chosen.is_normalised else 1.0
        return np.asarray(pooled / max(float(length), 1e-12), np.float32)


def _pooled(states: NDArray[np.float32], pooling: Pooling) -> NDArray[Any]:
    """Return the vector of hidden states ``[length, width]``, written otherwise than as the product that programs compute."""
    length = len(states)
    found: dict[Pooling, NDArray[Any]] = {
        "mean": states.mean(axis=0),
        "first": states[0],
        "last": states[-1],
        "mean_sqrt_len": states.sum(axis=0) / np.sqrt(length),
        "weighted_mean": np.average(states, axis=0, weights=np.arange(1, length + 1)),
    }
    return found[pooling]


def _hidden_port(model: ov.Model | ov.CompiledModel) -> Any:
    """Return the output of hidden states: by name, or the only one with a vector per token that is not called ``logits``."""
    named = [port for name in HIDDEN_STATES for port in model.outputs if name in port.get_names()]
    others = [port for port in model.outputs if LOGITS not in port.get_names()]
    vectors = [port for port in others if port.get_partial_shape().rank == ov.Dimension(3)]
    return next(iter(named or vectors), None)


def _expose_hidden_states(model: ov.Model) -> None:
    """Add what the head of a causal language model reads to its outputs."""
    (result,) = [node for node in model.get_results() if LOGITS in node.output(0).get_names()]
    head = find_head(result)
    assert head is not None, "a decoder without a recognised head is refused by the passes"
    model.add_results([named_result(HIDDEN_STATES[0], head.input_value(0))])
    model.validate_nodes_and_infer_types()


def _dense(layer: Dense, vector: NDArray[np.float32]) -> NDArray[np.float32]:
    shifted = layer.weight @ vector + (0 if layer.bias is None else layer.bias)
    return np.asarray(_ACTIVATIONS[layer.activation](shifted), np.float32)
