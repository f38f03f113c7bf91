"""The encoder of an encoder-decoder model, with the keys and values of its decoder's cross-attention."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.compiler_passes.lower_source import lower_source
from staticllm.core import KVType, ProgressEvent, SourceShape, SourceVariant
from staticllm.devices import default_kv_type, get_core
from staticllm.model_dir import read_model
from staticllm.pipelines.artifacts.fingerprint import file_digest
from staticllm.pipelines.loading.kind import LoadJob, OpenedModel, ProgramKind
from staticllm.pipelines.programs.compile import CompiledPrograms, CompilePlan, StartWith
from staticllm.pipelines.programs.source_runner import SourceRunner
from staticllm.ports import INPUT_FEATURES

SourcePrograms: TypeAlias = CompiledPrograms[SourceVariant, SourceShape]


@dataclass(frozen=True)
class SourceKind(ProgramKind[SourceVariant, SourceShape, SourceRunner]):
    """The kind of an encoder whose output a decoder sees through cross-attention.

    ``decoder_file``: the IR of that decoder, in the same directory. The job's config names the encoder's.
    """

    decoder_file: str = ""
    name = "encoder of sources"
    variant = SourceVariant
    shape = SourceShape

    @classmethod
    def fits(cls, model: ov.Model, directory: Path) -> bool:
        """Return whether the model reads features of sources, and nothing else."""
        del directory
        return [INPUT_FEATURES in port.get_names() for port in model.inputs] == [True]

    def lower(self, job: SourceJob, source: OpenedModel, start: StartWith) -> CompilePlan[SourceVariant, SourceShape]:
        """Join the encoder with what the decoder computes of its output; a call has one source."""
        del start
        decoder = read_model(get_core(), job.directory, model_file=self.decoder_file)
        lowered = lower_source(source.model, decoder, self.kv_type(job))
        options = self.options(job)
        if options.layout == "blocks":  # which are for layers that repeat behind a lookup of tokens
            options = replace(options, layout="separate")
        return CompilePlan(lowered, options, (SourceVariant(),), source.weights)

    def random_call(self, programs: SourcePrograms, variant: SourceVariant) -> Mapping[str, NDArray[Any]]:
        """Return noise in the range of log-mel spectrograms."""
        size = (1, programs.shape.bands, programs.shape.columns)
        return {INPUT_FEATURES: np.random.default_rng(0).uniform(-1, 1, size).astype(np.float32)}

    def runner(
        self, job: SourceJob, programs: SourcePrograms, memory: object, planned: Sequence[SourceVariant] = ()
    ) -> SourceRunner:
        """Bind the program, and run it once."""
        del memory, planned
        start = time.perf_counter()
        runner = SourceRunner(programs.shape, programs.compiled)
        runner.warm_up(known={**programs.costs, **programs.kept_costs})
        job.on_progress(ProgressEvent("warm-up", 1, 1, time.perf_counter() - start))
        return runner

    def kv_type(self, job: SourceJob) -> KVType:
        """Return the element type of the keys and values, as the decoder reads them."""
        properties = self.properties(job)["encode"]
        return job.config.kv_cache_precision or default_kv_type(get_core(), job.device, properties)

    def choices(self, job: SourceJob) -> dict[str, Any]:
        """Return the type of keys and values, and the digest of the decoder, a part of which is in the program."""
        xml = job.directory / self.decoder_file
        digests = [file_digest(path) for path in (xml, xml.with_suffix(".bin"))]
        return {"kv_type": self.kv_type(job), "decoder": " ".join(digests)}


SourceJob: TypeAlias = LoadJob[ProgramKind[SourceVariant, SourceShape, SourceRunner]]
