"""Encoders: models that make one vector, or scores, of each text of a call; how they are lowered, and their variants."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import openvino as ov
from msgspec import Meta
from numpy.typing import NDArray

from staticllm.core import EncoderShape, EncoderVariant, Pooling, ProgramLayout, Size, mode_of
from staticllm.errors import ConfigError, DeviceError, ModelError, last_line, quoted
from staticllm.model_dir import given_as
from staticllm.model_paths.path_kind import MODEL_XML
from staticllm.ports import INPUT_IDS

from ...compiler_passes import model_kind
from ...compiler_passes.artifacts.fingerprint import DENSE
from ...compiler_passes.artifacts.manifest import Manifest, stored
from ...compiler_passes.compiling.compile import CompiledPrograms, CompilePlan, StartWith
from ...compiler_passes.compiling.layout import fixed_layout
from ...compiler_passes.encoder import encoder_passes
from ...compiler_passes.lower_encoder import lower_encoder
from ...compiler_passes.model_kind import check_kind, is_lowered_as, kind_of
from ...compiler_passes.pass_pipeline import EncoderOptions
from ..loading.kind import LoadJob, OpenedModel, ProgramKind, properties_text
from .encoder_calls import check_ports, random_texts
from .encoder_files import EncoderFiles, read_encoder_files
from .encoder_runner import EncoderRunner
from .packing.chunks import MOST_TOKENS

EncoderPlan: TypeAlias = CompilePlan[EncoderVariant, EncoderShape]
SIZES = ((1, 16), (1, 32), (1, 64), (1, 128), (2, 128), (4, 128), (8, 128), (1, 256), (1, 512))
"""The batches and rows of the programs. Sequences of 128 are the fastest, because attention is quadratic in their length."""
MORE_ROWS = (12, 20, 24, 28, 36, 40, 44, 48, 56, 72, 80, 88, 96, 112, 160, 192, 224)
SHARED_SIZES = (*SIZES, *((1, rows) for rows in MORE_ROWS))
"""The same where one program runs all sizes, so that another one costs no memory: a text alone has fewer idle rows."""
BLOCK_ROWS = 256
"""The most rows of a call in blocks, except for longer texts: on NPUs, 256 rows cost 1.3 times two calls of 128 at most."""
BLOCK_SIZES = tuple((1, rows) for rows in (16, 32, 48, 64, 96, 128, 192, BLOCK_ROWS))
"""The same in blocks. One call of several sequences is not faster there than a call for each."""
_SIZES_OF: Mapping[ProgramLayout, Sequence[tuple[int, int]]] = {"separate": SIZES, "blocks": BLOCK_SIZES}
TOKENS_PER_TEXT = 8
"""The least tokens of a call for each of its texts."""
CHUNK_ROWS, SHORT_CHUNKS = 512, (64, 256)
"""The rows of calls that continue a text, and of others for its end, where another size costs no memory."""
REST_ROWS, BEGINNINGS = (8, 12, 16, 24, 32, 48, 64, 96, 128), (32, 64, MOST_TOKENS)
"""There, too: the rows of calls that run the rest of a text whose beginning is kept, and the tokens of such beginnings."""


def continuing_for(longest: int, is_shared: bool, rows: int = CHUNK_ROWS) -> tuple[EncoderVariant, ...]:
    """Return the variants that continue texts of up to ``longest`` tokens: at most one, or several if they share a program.

    In a shared program, a text can go on after any number of its tokens: a beginning may be kept, and chunks may be short.

    Args:
        rows: The rows of a call that continues a text, unless it shares a program.
    """
    if not is_shared:
        most = -(-longest // rows) * rows - rows  # all chunks but the last one are full
        return (EncoderVariant(1, rows, 1, most),) if most else ()
    past = [min(CHUNK_ROWS, longest)]
    while past[-1] < longest:
        past.append(min(2 * past[-1], longest))
    beginnings = [seen for seen in BEGINNINGS if seen < past[0]]
    rests = {
        EncoderVariant(1, rows, 1, seen) for rows in REST_ROWS for seen in (*beginnings, past[0]) if rows <= longest
    }
    if longest <= CHUNK_ROWS:
        return tuple(sorted(rests))
    return tuple(
        sorted(rests | {EncoderVariant(1, rows, 1, seen) for rows in (*SHORT_CHUNKS, CHUNK_ROWS) for seen in past})
    )


def default_pooling(shape: EncoderShape) -> Pooling:
    """Return the last token for a model whose tokens see only earlier ones, else the first, as GenAI does."""
    return "last" if all(mask.after == 0 for mask in shape.masks) else "first"


def variants_for(longest: int, sizes: Sequence[tuple[int, int]] = SIZES) -> tuple[EncoderVariant, ...]:
    """Return a variant for each of ``sizes`` that is useful for texts of up to ``longest`` tokens, and one that holds these."""
    useful = {(batch, rows) for batch, rows in sizes if rows <= longest}
    if all(rows < longest for _, rows in useful):
        useful.add((1, longest))
    return tuple(sorted(EncoderVariant(b, rows, max(b, b * rows // TOKENS_PER_TEXT)) for b, rows in useful))


def _vocab_size(model: ov.Model) -> int | None:
    """Return the number of rows of the table of token vectors; None if it is not found."""
    ids = next((port for port in model.inputs if INPUT_IDS in port.get_names()), None)
    if ids is None:
        return None
    consumers = [target.get_node() for target in ids.get_target_inputs()]
    while consumers:
        node = consumers.pop()
        if node.get_type_name() == "Gather":
            dim = node.input_value(0).get_partial_shape()[0]
            return dim.get_length() if dim.is_static else None
        if node.get_type_name() == "Convert":
            consumers += [target.get_node() for target in node.output(0).get_target_inputs()]
    return None


EncoderPrograms: TypeAlias = CompiledPrograms[EncoderVariant, EncoderShape]


@dataclass(frozen=True)
class EncoderChoices:
    """What the user chose; None for what the model's files say."""

    pooling: Pooling | None = None
    is_normalised: bool = True
    max_length: int | None = None
    """In tokens."""
    sizes: Sequence[tuple[int, int]] | None = None
    """The batches and rows of the programs."""
    properties: Mapping[str, object] | None = None
    """OpenVINO's and those in ``OPTIONS``, by their names in capitals."""
    score_tokens: tuple[int, ...] = ()
    """The tokens whose logits a causal language model returns, in place of hidden states."""
    output: Literal["embeddings", "scores"] | None = None
    """What the caller can use; None for either."""
    names: Sequence[str] = ()
    """What else the caller's constructor takes."""


@dataclass(frozen=True)
class EncoderSetChoices:
    """The choices behind an encoder's set: the most tokens of a text, and the batches and rows; None for the usual ones."""

    max_length: Size
    sizes: Annotated[list[tuple[Size, Size]], Meta(max_length=64)] | None


@dataclass(frozen=True)
class EncoderKind(ProgramKind[EncoderVariant, EncoderShape, EncoderRunner]):
    """The kind of an encoder, with everything that the user and the model's files choose."""

    chosen: EncoderChoices
    files: EncoderFiles
    max_length: int
    """The tokens of a text that are asked for; the graph may allow fewer."""
    pad_id: int = 0
    """Fills idle rows."""

    name = "encoder"
    variant = EncoderVariant
    shape = EncoderShape

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

    def check_graph(self, model: ov.Model, directory: Path) -> None:
        """Check that the model is an encoder, or a decoder of which it is said how its vectors are pooled.

        Raises:
            ModelError: it is neither, or made of a GGUF file.
        """
        check_kind(model, directory, "encoder", self.can_embed)
        given = given_as(directory)
        if given != str(directory):
            raise ModelError(
                f"{quoted(given)} is a GGUF file, and GGUF files are read for generation only: for vectors or scores, make an "
                "OpenVINO model of the original with `staticllm export`"
            )

    def lower(self, job: AnyJob, opened: OpenedModel, start: StartWith) -> EncoderPlan:
        """Lower the model, and choose its variants; all of its programs are there from the start."""
        del start
        given = self.chosen
        vocab_size = _vocab_size(opened.model)
        options = EncoderOptions(self.max_length, self.files.dense, given.is_normalised, given.score_tokens)
        lowered = lower_encoder(opened.model, options, encoder_passes(job.device))
        shape = lowered.shape
        if given.max_length is not None and given.max_length > shape.max_rows:
            raise ConfigError(
                f"max_length={given.max_length}: the model was made for texts of at most {shape.max_rows} tokens; lower it"
            )
        longest = min(self.max_length, shape.max_rows)
        layout = fixed_layout(job.device, job.config)
        is_shared = mode_of(layout) == "shared"
        unsafe = () if is_shared else shape.unsafe_rows
        longest -= longest in unsafe
        rows = BLOCK_ROWS if layout == "blocks" else CHUNK_ROWS
        sizes = given.sizes or _SIZES_OF.get(layout, SHARED_SIZES)
        sizes = [size for size in sizes if size[1] not in unsafe and (shape.is_batchable or size[0] == 1)]
        continuing = continuing_for(longest, is_shared, rows) if self._can_continue(shape, rows) else ()
        if continuing:
            sizes = [size for size in sizes if size[1] <= rows]
            variants = (*variants_for(min(longest, rows), sizes), *continuing)
        else:
            lowered = replace(lowered, continued=None)
            shape = replace(shape, past=())
            variants = variants_for(longest, sizes)
        lowered = replace(lowered, shape=replace(shape, longest=longest, vocab_size=vocab_size))
        return CompilePlan(lowered, self.options(job), variants, opened.weights)

    def _can_continue(self, shape: EncoderShape, rows: int) -> bool:
        """Return whether texts can run in parts of ``rows``. A vector that needs all tokens, such as a mean, cannot."""
        is_possible = self.wants_chunks and rows not in shape.unsafe_rows and bool(shape.past)
        return is_possible and (shape.pooling or self.pooling or default_pooling(shape)) == "last"

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
        pooling = self.pooling or default_pooling(programs.shape)
        runner = EncoderRunner(programs.shape, programs.compiled, pooling, self.pad_id)
        try:
            runner.warm_up(known={**programs.costs, **programs.kept_costs}, on_progress=job.on_progress)
        except (RuntimeError, MemoryError) as error:
            is_memory = isinstance(error, MemoryError)
            reason = "there is not enough memory; lower max_length" if is_memory else last_line(error)
            raise DeviceError(f"{job.device} cannot run the encoder: {reason}") from error
        return runner

    @classmethod
    def fits(cls, model: ov.Model, directory: Path) -> bool:
        """Return whether the model computes vectors or scores, or is a decoder whose files say how to pool its vectors."""
        return is_lowered_as(kind_of(model), "encoder", read_encoder_files(directory).pooling is not None)

    @staticmethod
    def check_stored(shape: EncoderShape, content: Mapping[str, Any]) -> None:
        """Check the choices, the layout, the pooling and the longest text.

        Raises:
            ValueError: one of them is impossible.
        """
        stored(EncoderSetChoices, content["config"])
        ProgramKind.check_stored(shape, content)
        if content["programs"] not in ("separate", "blocks", "shared"):
            raise ValueError("the programs are not those of an encoder")
        if shape.pooling not in (None, "first", "last", "mean") or not shape.longest:
            raise ValueError("its pooling or its longest text is impossible")

    def asked(self, job: AnyJob) -> dict[str, str]:
        """Return the digest of the Dense modules, and the choices."""
        sizes = self.chosen.sizes
        return {
            DENSE: _digest_of(self.files),
            "score_tokens": ", ".join(map(str, self.chosen.score_tokens)) or "none",
            "max_length": str(self.max_length),
            "sizes": ("default" if sizes is None else ", ".join(f"{batch}x{rows}" for batch, rows in sizes))
            + (", chunks" if self.wants_chunks and has_states(job.directory / MODEL_XML) else ""),
            "PROGRAMS": fixed_layout(job.device, job.config),
            "normalize": str(self.chosen.is_normalised),
            "properties": properties_text(self.properties(job)["encode"]),
        }

    def choices(self, job: AnyJob) -> dict[str, Any]:
        """Return the longest text and the sizes that were asked for."""
        del job
        sizes = self.chosen.sizes
        return {"max_length": self.max_length, "sizes": None if sizes is None else [list(size) for size in sizes]}

    def decided_by(self, manifest: Manifest, job: AnyJob) -> AnyJob:
        """Return the job with the set's sizes and longest text for whatever the user left out."""
        config = manifest.config
        given = self.chosen
        sizes = given.sizes if config["sizes"] is None or given.sizes is not None else config["sizes"]
        decided = replace(given, sizes=None if sizes is None else [(batch, rows) for batch, rows in sizes])
        max_length = config["max_length"] if given.max_length is None else self.max_length
        return replace(job, kind=replace(self, chosen=decided, max_length=max_length))

    def check(self, programs: EncoderPrograms) -> None:
        check_ports(programs.shape, programs.compiled)

    def _check_output(self, job: AnyJob, shape: EncoderShape) -> None:
        """Check that the model computes what the caller can use.

        Raises:
            ModelError: it computes scores instead of embeddings, or the reverse.
        """
        output = shape.output
        wanted = self.chosen.output
        if wanted not in (None, output):
            kind = model_kind.SCORES if output == "scores" else model_kind.EMBEDDINGS
            raise ModelError(f"{quoted(job.directory)} is {kind.what}: {kind.remedy}")

    def _check_pooling(self, job: AnyJob, shape: EncoderShape) -> None:
        """Check that a model that pools by itself pools as the user and its files say.

        Raises:
            ConfigError: the user chose another pooling.
            ModelError: its files name another one, and the user said nothing.
        """
        own = shape.pooling
        chosen = self.chosen.pooling
        named = self.files.pooling
        if shape.output == "scores" or own is None:
            return
        if chosen not in (None, own):
            raise ConfigError(
                f"pooling_type {chosen!r}: the graph of the model pools by itself, by {own!r}: leave pooling_type out"
            )
        if chosen is None and named not in (None, own):
            raise ModelError(
                f"{quoted(job.directory)}: its files name the pooling {named!r}, and its graph pools by {own!r}: give "
                "pooling_type to say that the graph is right"
            )


AnyJob: TypeAlias = LoadJob[ProgramKind[EncoderVariant, EncoderShape, EncoderRunner]]
EncoderJob: TypeAlias = LoadJob[EncoderKind]
"""One encoder for one device."""


def has_states(path: Path) -> bool:
    """Return whether the IR at this path reads states, as a decoder that was exported with past does.

    Raises:
        ModelError: the file cannot be read.
    """
    try:
        return b'type="ReadValue"' in path.read_bytes()
    except OSError as error:
        raise ModelError(f"{quoted(path)} cannot be read: {error.strerror or error}") from None


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
