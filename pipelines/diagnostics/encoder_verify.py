"""Compares a lowered encoder with the original: each text alone, packed with others, and the original model, in f32."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.compiler_passes.graph.exported_inputs import ATTENTION_MASK, BEAM_IDX
from staticllm.compiler_passes.graph.step_graph import named_result
from staticllm.compiler_passes.shapes.add_pooling import Dense
from staticllm.compiler_passes.shapes.select_logits import find_head
from staticllm.compiler_passes.shapes.select_output import HIDDEN_STATES
from staticllm.core import EncoderShape, OnProgress, Pooling, ProgramMode
from staticllm.devices import get_core, kind
from staticllm.errors import ModelError, last_line
from staticllm.model_dir import read_model
from staticllm.pipelines.artifacts.blob_set import read_manifest, rewrite_manifest
from staticllm.pipelines.artifacts.manifest import Manifest
from staticllm.pipelines.diagnostics.reference import EXACT
from staticllm.pipelines.diagnostics.reports import Agreement, Verdict
from staticllm.pipelines.embedding.encoder_job import encoder_job
from staticllm.pipelines.embedding.encoder_kind import EncoderChoices, EncoderJob
from staticllm.pipelines.embedding.encoder_runner import EncoderRunner
from staticllm.pipelines.embedding.packing.encoder_buffers import Vectors
from staticllm.pipelines.embedding.packing.tokenized_text import TokenizedText
from staticllm.pipelines.embedding.pool.instances import embed_texts
from staticllm.pipelines.loading.load import load_job
from staticllm.ports import INPUT_IDS, LOGITS, POSITION_IDS, TOKEN_TYPE_IDS

LENGTHS = (1, 2, 3, 5, 9, 17, 33, 60, 100, 128, 250, 512)
"""Tokens of the texts, as far as the model allows them."""
SIZES = ((1, 32), (2, 64), (4, 128))
"""Batches and rows of the programs that are compared; a program for the longest text is added."""
TOLERANCES = {"CPU": 1e-5}
"""Largest difference as a share of the range of the original's numbers, by device."""
OTHER_TOLERANCE = 1e-2
LEAST_COSINE, MOST_DISTANCE = 0.99, 0.1
"""Limits beyond which a set fails verification."""
FIRST_ID = 8
"""Token ids below this are special in most vocabularies."""
_ACTIVATIONS: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "silu": lambda x: x / (1 + np.exp(-x)),
}


class EncoderReference:
    """The encoder as it was exported, on the CPU in f32: one text per call, pooled by numpy.

    Each length has a static program: fused attention without a mask computes wrong values in a dynamic program for many tokens
    after one, and with as many tokens as heads only a dynamic one is right (OpenVINO 2026.4).
    """

    def __init__(self, job: EncoderJob, shape: EncoderShape, pooling: Pooling) -> None:
        self._job, self._shape = job, shape
        self._pooling: Pooling = pooling
        config = job.config
        self._model = read_model(get_core(), job.directory, config.weights_path, config.weights_decryption_callback)
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
        return values if self._shape.output == "scores" else self._vector(values)

    def _output(self, program: ov.CompiledModel) -> ov.ConstOutput:
        if self._shape.output == "scores":
            return program.output(LOGITS)
        found = _hidden_port(program)
        assert found is not None, "the constructor has exposed it"
        return found

    def _vector(self, states: NDArray[np.float32]) -> Vectors:
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


def verify_encoder(
    models_path: str | os.PathLike[str],
    device: str = "CPU",
    modes: Sequence[ProgramMode] = ("separate", "shared"),
    on_progress: OnProgress = lambda event: None,
) -> Iterator[Verdict]:
    """Compare texts of several lengths alone, packed with each other, and as the original computes them; yield each verdict.

    Raises:
        ModelError: a file of the model is missing or damaged, or the model is no encoder.
        UnsupportedModelError: a pass cannot lower the model.
        DeviceError: the device is missing, or refused a program.
    """
    expected: Vectors | None = None
    tolerance = TOLERANCES.get(kind(device.upper()), OTHER_TOLERANCE)
    for mode in modes:
        exact = (
            {name: value for name, value in EXACT.items() if name != "KV_CACHE_PRECISION"} if tolerance < 1e-3 else {}
        )
        choices = EncoderChoices(sizes=SIZES, properties={**exact, "PROGRAMS": mode})
        job = encoder_job(models_path, device, choices, on_progress)
        runner = load_job(job).runner
        texts = _texts(runner)
        if expected is None:
            expected = _originals(job, runner, texts)
        alone = np.concatenate([embed_texts(runner, [text]) for text in texts])
        shared = _run_full(runner, texts)
        packed, others = np.concatenate([call.vectors for call in shared]), [i for call in shared for i in call.texts]
        lengths = [len(text) for text in texts]
        yield _verdict(f"{mode}: alone, against the original", alone, expected, lengths, tolerance)
        lengths = [lengths[index] for index in others]
        full = f", {len(others)} texts in {len(shared)} calls"
        yield _verdict(f"{mode}: packed, against the original", packed, expected[others], lengths, tolerance, full)
        yield _verdict(f"{mode}: packed, against alone", packed, alone[others], lengths, tolerance, full)


def _verdict(
    check: str, found: Vectors, other: Vectors, lengths: Sequence[int], tolerance: float, full: str = ""
) -> Verdict:
    differences = np.abs(found - other).max(axis=1)
    share = float(differences.max() / np.ptp(other)) if np.isfinite(found).all() else math.inf
    worst = lengths[int(differences.argmax())]
    return Verdict(
        check, share <= tolerance, share, f"most at {worst} of {min(lengths)} to {max(lengths)} tokens{full}"
    )


def verify_encoder_set(models_path: str | os.PathLike[str], device: str, folder: Path) -> Manifest:
    """Compare the vectors of a set with the CPU in f32, and write the result into its manifest.

    ``agreement`` is the smallest cosine between the vectors of a text, or between all scores.

    Raises:
        BlobError: the set cannot be loaded.
    """
    manifest = read_manifest(folder)
    options = {name: value for name, value in manifest.properties["encode"].items() if name != "PERFORMANCE_HINT"}
    given = {"PROGRAMS": manifest.programs, "BLOB_PATH": str(folder), **options}
    choices = EncoderChoices(is_normalised=manifest.fingerprint.to_json()["normalize"] == "True", properties=given)
    job = encoder_job(models_path, device, choices)
    runner = load_job(job).runner
    texts = _texts(runner)
    expected, vectors = _originals(job, runner, texts), embed_texts(runner, texts)
    distance = float(np.abs(vectors - expected).max() / np.ptp(expected))
    cosine = (
        _least_cosine(vectors, expected)
        if runner.shape.output == "embeddings"
        else _least_cosine(vectors.reshape(1, -1), expected.reshape(1, -1))
    )
    is_ok = cosine >= LEAST_COSINE and distance <= MOST_DISTANCE
    agreement = Agreement(is_ok, cosine, distance, places=len(texts), against="CPU, f32")
    manifest = replace(manifest, verification=agreement.as_dict())
    rewrite_manifest(folder, manifest)
    return manifest


def _originals(job: EncoderJob, runner: EncoderRunner, texts: Sequence[TokenizedText]) -> Vectors:
    reference = EncoderReference(job, runner.shape, runner.pooling)
    return np.stack([reference(text) for text in texts])


def _texts(runner: EncoderRunner) -> list[TokenizedText]:
    """Return texts of random ids, the second half of each with token type 1 if the model knows types."""
    random, most = np.random.default_rng(0), runner.shape.vocab_size or 1000
    chunked = [runner.max_rows + 88, 2 * runner.max_rows + 1] if runner.continuing else []
    lengths = [length for length in LENGTHS if length <= runner.max_rows]
    lengths += [length for length in chunked if length <= runner.max_tokens]
    has_types = runner.shape.has_token_types
    return [
        TokenizedText(
            random.integers(min(FIRST_ID, most - 1), most, length),
            (np.arange(length) >= length // 2).astype(np.int64) if has_types else None,
        )
        for length in lengths
    ]


@dataclass(frozen=True)
class FullCall:
    """A call that holds as many texts as fit: their indices, and their vectors in this order."""

    texts: tuple[int, ...]
    vectors: Vectors


def _run_full(runner: EncoderRunner, texts: Sequence[TokenizedText]) -> list[FullCall]:
    """Run one call of each variant that is full of texts: several per sequence, if the model allows it."""
    found = []
    for variant in runner.variants:
        sequences: list[list[int]] = [[] for _ in range(variant.batch)]
        order = np.random.default_rng(variant.batch * variant.rows).permutation(len(texts)).tolist()
        for index in order:
            num_held = sum(map(len, sequences))
            room = [
                line
                for line in sequences
                if sum(len(texts[i]) for i in line) + len(texts[index]) <= variant.rows
                and (runner.shape.is_packable or not line)
            ]
            if room and num_held < variant.texts:
                min(room, key=len).append(index)
        held = tuple(index for line in sequences for index in line)
        vectors = runner.run(variant, [[texts[index] for index in line] for line in sequences])
        found.append(FullCall(held, vectors))
    return found


def _least_cosine(found: Vectors, other: Vectors) -> float:
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(other, axis=1)
    return float(np.min((found * other).sum(axis=1) / np.maximum(norms, 1e-12)))
