"""The decoder of an encoder-decoder model once more, as a program that says which frames the tokens of a text look at."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from staticllm.compiler_passes.lower_alignment import lower_alignment
from staticllm.core import AlignmentShape, KVType, ProgressEvent, SourceVariant
from staticllm.devices import default_kv_type, get_core
from staticllm.pipelines.loading.kind import LoadJob, OpenedModel, ProgramKind
from staticllm.pipelines.programs.alignment_runner import AlignmentRunner
from staticllm.pipelines.programs.compile import CompiledPrograms, CompilePlan, StartWith
from staticllm.ports import INPUT_IDS

AlignmentPrograms: TypeAlias = CompiledPrograms[SourceVariant, AlignmentShape]


@dataclass(frozen=True)
class AlignmentKind(ProgramKind[SourceVariant, AlignmentShape, AlignmentRunner]):
    """The kind of a decoder whose cross-attention is wanted. ``heads``: layer and head; ``rows``: the most tokens of a text."""

    heads: tuple[tuple[int, int], ...] = ()
    rows: int = 0
    name = "alignment of sources"
    variant = SourceVariant
    shape = AlignmentShape

    def check_graph(self, model: object, directory: object) -> None:
        """The same file is loaded as a decoder, which checks it."""

    def lower(
        self, job: AlignmentJob, source: OpenedModel, start: StartWith
    ) -> CompilePlan[SourceVariant, AlignmentShape]:
        """Lower the decoder for whole texts; a call has one text about one source."""
        del start
        assert job.config.sources is not None, "a decoder without cross-attention"
        lowered = lower_alignment(source.model, self.heads, self.rows, job.config.sources.source_len, self.kv_type(job))
        options = self.options(job)
        if options.layout == "blocks":
            options = replace(options, layout="separate")
        return CompilePlan(lowered, options, (SourceVariant(),), source.weights)

    def random_call(self, programs: AlignmentPrograms, variant: SourceVariant) -> Mapping[str, NDArray[Any]]:
        """Return tokens about a source of noise."""
        shape = programs.shape
        rng = np.random.default_rng(0)
        sizes = {state.past_name: (1, state.heads, shape.source_len, state.head_dim) for state in shape.states}
        types = {state.past_name: np.float16 if state.kv_type == "f16" else np.float32 for state in shape.states}
        noise = {name: rng.uniform(-1, 1, size).astype(types[name]) for name, size in sizes.items()}
        return {INPUT_IDS: np.arange(shape.rows, dtype=np.int64)[None] % 32, **noise}

    def runner(
        self, job: AlignmentJob, programs: AlignmentPrograms, memory: object, planned: Sequence[SourceVariant] = ()
    ) -> AlignmentRunner:
        """Bind the program, and run it once."""
        del memory, planned
        start = time.perf_counter()
        runner = AlignmentRunner(programs.shape, programs.compiled)
        runner.warm_up(known={**programs.costs, **programs.kept_costs})
        job.on_progress(ProgressEvent("warm-up", 1, 1, time.perf_counter() - start))
        return runner

    def kv_type(self, job: AlignmentJob) -> KVType:
        """Return the element type of the keys and values of sources, as in the bank."""
        properties = self.properties(job)["encode"]
        return job.config.kv_cache_precision or default_kv_type(get_core(), job.device, properties)

    def choices(self, job: AlignmentJob) -> dict[str, Any]:
        """Return the heads, the rows, and the type of keys and values."""
        return {"heads": [list(each) for each in self.heads], "rows": self.rows, "kv_type": self.kv_type(job)}


AlignmentJob: TypeAlias = LoadJob[ProgramKind[SourceVariant, AlignmentShape, AlignmentRunner]]
