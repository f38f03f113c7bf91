"""Encoders: models that make one vector, or scores, of each text of a call."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from numpy.typing import NDArray

from staticllm.compiler_passes import model_kind
from staticllm.compiler_passes.pass_pipeline import EncoderOptions
from staticllm.core import EncoderShape, EncoderVariant, Pooling, ProgramMode, ProgressEvent
from staticllm.devices import get_core
from staticllm.errors import ConfigError, DeviceError, ModelError, last_line
from staticllm.model_paths.path_kind import MODEL_XML
from staticllm.pipelines.artifacts.blob_set import json_properties
from staticllm.pipelines.artifacts.fingerprint import EncoderFingerprint, fingerprint_model, machine_values
from staticllm.pipelines.artifacts.manifest import Manifest
from staticllm.pipelines.embedding.encoder_calls import check_ports, random_texts
from staticllm.pipelines.embedding.encoder_files import EncoderFiles
from staticllm.pipelines.embedding.encoder_plan import EncoderPlan, Wanted, default_pooling, plan_encoder
from staticllm.pipelines.embedding.encoder_runner import EncoderRunner
from staticllm.pipelines.loading.kind import LoadJob, ProgramKind
from staticllm.pipelines.programs.compile import CompiledPrograms, StartWith
from staticllm.pipelines.programs.layout import program_mode

EncoderPrograms: TypeAlias = CompiledPrograms[EncoderVariant, EncoderShape]


@dataclass(frozen=True)
class EncoderChoices:
    """What the user chose; None for what the model's files say. ``names``: what else the caller's constructor takes.

    ``max_length`` is in tokens, ``sizes`` are the batches and rows of the programs, ``properties`` are OpenVINO's and those in
    ``OPTIONS``, by their names in capitals. ``score_tokens`` are the
    tokens whose logits a causal language model returns, in place of hidden states. ``output``: what the caller can use; None for
    either.
    """

    pooling: Pooling | None = None
    is_normalised: bool = True
    max_length: int | None = None
    sizes: Sequence[tuple[int, int]] | None = None
    properties: Mapping[str, object] | None = None
    score_tokens: tuple[int, ...] = ()
    output: Literal["embeddings", "scores"] | None = None
    names: Sequence[str] = ()


@dataclass(frozen=True)
class EncoderKind(ProgramKind[EncoderVariant, EncoderShape, EncoderRunner]):
    """The kind of an encoder, with everything that the user and the model's files choose.

    ``max_length``: the tokens of a text that are asked for; the graph may allow fewer. ``pad_id`` fills idle rows.
    """

    chosen: EncoderChoices
    files: EncoderFiles
    max_length: int
    pad_id: int = 0

    name = "encoder"
    variant, shape = EncoderVariant, EncoderShape

    @property
    def can_embed(self) -> bool:
        """Whether the user or a file says how a decoder's vectors become one: then it is an embedder, not a chat model."""
        return bool(self.pooling or self.chosen.score_tokens)

    @property
    def pooling(self) -> Pooling | None:
        """The pooling that the user chose, or the model's files name; None if neither does."""
        return self.chosen.pooling or self.files.pooling

    @property
    def wants_chunks(self) -> bool:
        """Whether texts may be continued if the model has states: a vector must be that of the last token then."""
        return bool(self.chosen.score_tokens) or self.pooling in (None, "last")

    def plan(self, job: AnyJob, for_blobs: bool = False, start: StartWith = "all programs") -> EncoderPlan:
        """Read and lower the model, and choose its variants; all of its programs are there from the start."""
        del start
        given = self.chosen
        wanted = Wanted(
            lowering=EncoderOptions(self.max_length, self.files.dense, given.is_normalised, given.score_tokens),
            max_length=self.max_length,
            given_length=given.max_length,
            sizes=given.sizes,
            pooling=self.pooling,
            can_embed=self.can_embed,
            wants_chunks=self.wants_chunks,
        )
        return plan_encoder(job, wanted, self.properties(job), for_blobs)

    def random_call(self, programs: EncoderPrograms, variant: EncoderVariant) -> Mapping[str, NDArray[Any]]:
        """Return a call that is full of random tokens."""
        return random_texts(programs.shape, variant)

    def runner(
        self, job: AnyJob, programs: EncoderPrograms, memory: object, planned: Sequence[EncoderVariant] = ()
    ) -> EncoderRunner:
        """Bind the programs, and run each of them once.

        Raises:
            ModelError, ConfigError: the model computes, or pools, something else than the caller wants.
            DeviceError: the device cannot run a program.
        """
        del memory, planned
        self._check_output(job, programs.shape)
        self._check_pooling(job, programs.shape)
        start = time.perf_counter()
        pooling = self.pooling or default_pooling(programs.shape)
        runner = EncoderRunner(programs.shape, programs.compiled, pooling, self.pad_id)
        try:
            runner.warm_up(known={**programs.costs, **programs.kept_costs})
        except (RuntimeError, MemoryError) as error:
            is_memory = isinstance(error, MemoryError)
            reason = "there is not enough memory; lower max_length" if is_memory else last_line(error)
            raise DeviceError(f"{job.device} cannot run the encoder: {reason}") from error
        job.on_progress(ProgressEvent("warm-up", 1, 1, time.perf_counter() - start))
        return runner

    def fingerprint(self, job: AnyJob) -> EncoderFingerprint:
        """Return the digests of the model and its Dense modules, the machine, and the choices."""
        model = fingerprint_model(job.directory, job.weights)
        properties = sorted(json_properties(self.properties(job)["encode"]).items())
        sizes = self.chosen.sizes
        return EncoderFingerprint(
            ir_digest=model.ir_digest,
            weights_digest=model.weights_digest,
            **machine_values(get_core(), job.device),
            dense=_digest_of(self.files),
            score_tokens=", ".join(map(str, self.chosen.score_tokens)) or "none",
            max_length=str(self.max_length),
            sizes=("default" if sizes is None else ", ".join(f"{batch}x{rows}" for batch, rows in sizes))
            + (", chunks" if self.wants_chunks and has_states(job.directory / MODEL_XML) else ""),
            programs=mode_of(job),
            normalize=str(self.chosen.is_normalised),
            properties=", ".join(f"{name}={value}" for name, value in properties),
        )

    def choices(self, job: AnyJob) -> dict[str, Any]:
        """Return the longest text and the sizes that were asked for."""
        del job
        sizes = self.chosen.sizes
        return {"max_length": self.max_length, "sizes": None if sizes is None else [list(size) for size in sizes]}

    def decided_by(self, manifest: Manifest, job: AnyJob) -> AnyJob:
        """Return the job with the set's sizes and longest text for whatever the user left out."""
        stored, given = manifest.config, self.chosen
        sizes = given.sizes if stored["sizes"] is None or given.sizes is not None else stored["sizes"]
        decided = replace(given, sizes=None if sizes is None else [(batch, rows) for batch, rows in sizes])
        max_length = stored["max_length"] if given.max_length is None else self.max_length
        return replace(job, kind=replace(self, chosen=decided, max_length=max_length))

    def check(self, programs: EncoderPrograms) -> None:
        """Check the ports of imported programs."""
        check_ports(programs.shape, programs.compiled)

    def _check_output(self, job: AnyJob, shape: EncoderShape) -> None:
        """Check that the model computes what the caller can use.

        Raises:
            ModelError: it computes scores instead of embeddings, or the reverse.
        """
        output, wanted = shape.output, self.chosen.output
        if wanted not in (None, output):
            kind = model_kind.SCORES if output == "scores" else model_kind.EMBEDDINGS
            raise ModelError(f"{str(job.directory)!r} is {kind.what}: {kind.remedy}")

    def _check_pooling(self, job: AnyJob, shape: EncoderShape) -> None:
        """Check that a model that pools by itself pools as the user and its files say.

        Raises:
            ConfigError: the user chose another pooling.
            ModelError: its files name another one, and the user said nothing.
        """
        own, chosen, named = shape.pooling, self.chosen.pooling, self.files.pooling
        if shape.output == "scores" or own is None:
            return
        if chosen not in (None, own):
            raise ConfigError(
                f"pooling_type {chosen!r}: the graph of the model pools by itself, by {own!r}: leave pooling_type out"
            )
        if chosen is None and named not in (None, own):
            raise ModelError(
                f"{str(job.directory)!r}: its files name the pooling {named!r}, and its graph pools by {own!r}: give "
                "pooling_type to say that the graph is right"
            )


AnyJob: TypeAlias = LoadJob[ProgramKind[EncoderVariant, EncoderShape, EncoderRunner]]
EncoderJob: TypeAlias = LoadJob[EncoderKind]
"""One encoder for one device."""


def mode_of(job: LoadJob[Any]) -> ProgramMode:
    """Return ``separate`` if each variant has a program of its own, else ``shared``."""
    return program_mode(job.device, job.config)


def has_states(path: Path) -> bool:
    """Return whether the IR at this path reads states, as a decoder that was exported with past does.

    Raises:
        ModelError: the file cannot be read.
    """
    try:
        return b'type="ReadValue"' in path.read_bytes()
    except OSError as error:
        raise ModelError(f"{str(path)!r} cannot be read: {error.strerror or error}") from None


def _digest_of(files: EncoderFiles) -> str:
    """Return a digest of the Dense modules, which are part of the programs; ``none`` if there are none."""
    if not files.dense:
        return "none"
    digest = hashlib.blake2b(digest_size=32)
    for dense in files.dense:
        arrays = [b"" if array is None else array.tobytes() for array in (dense.weight, dense.bias, dense.residual)]
        sizes = [len(array) for array in arrays]
        digest.update(repr((dense.weight.shape, sizes, dense.activation, dense.has_residual)).encode())
        digest.update(b"".join(arrays))
    return digest.hexdigest()
