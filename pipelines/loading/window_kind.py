"""The programs of an encoder-decoder model of which a call has one window: its encoder, and the alignment of texts with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.core import AlignmentShape, CrossWindowShape, CrossWindowVariant, KVType, ProgressEvent
from staticllm.devices import default_kv_type, get_core
from staticllm.model_dir import read_model
from staticllm.ports import INPUT_FEATURES, INPUT_IDS
from staticllm.system.long_calls import told

from ...compiler_passes.artifacts.fingerprint import file_digest
from ...compiler_passes.compiling.compile import CompiledPrograms, CompilePlan, StartWith
from ...compiler_passes.lower_alignment import lower_alignment
from ...compiler_passes.lower_cross_window import LoweredForOneWindow, lower_cross_window
from ..programs.window_runner import AlignmentRunner, WindowRunner
from .kind import LoadJob, OpenedModel, ProgramKind

S = TypeVar("S", CrossWindowShape, AlignmentShape)
R = TypeVar("R", WindowRunner, AlignmentRunner)
WindowPrograms: TypeAlias = CompiledPrograms[CrossWindowVariant, CrossWindowShape]
AlignmentPrograms: TypeAlias = CompiledPrograms[CrossWindowVariant, AlignmentShape]


@dataclass(frozen=True)
class OneWindowKind(ProgramKind[CrossWindowVariant, S, R]):
    """What kinds have in common whose calls have one window: one program, of one size."""

    variant = CrossWindowVariant
    runner_class: ClassVar[Callable[..., Any]]

    def lowered(self, job: LoadJob[Any], opened: OpenedModel) -> LoweredForOneWindow[S]:
        raise NotImplementedError

    def lower(self, job: LoadJob[Any], opened: OpenedModel, start: StartWith) -> CompilePlan[CrossWindowVariant, S]:
        """Lower the model; there is one program."""
        del start
        return CompilePlan(self.lowered(job, opened), self.options(job), (CrossWindowVariant(),), opened.weights)

    def runner(
        self,
        job: LoadJob[Any],
        programs: CompiledPrograms[CrossWindowVariant, S],
        memory: object,
        planned: Sequence[CrossWindowVariant] = (),
    ) -> R:
        """Bind the program, and run it once."""
        del memory, planned
        start = time.perf_counter()
        runner: R = self.runner_class(programs.shape, programs.compiled)
        event = ProgressEvent("warm-up", 1, 1, 0.0)
        with told(job.on_progress, event):
            runner.warm_up(known={**programs.costs, **programs.kept_costs})
        job.on_progress(replace(event, seconds=time.perf_counter() - start))
        return runner

    def kv_type(self, job: LoadJob[Any]) -> KVType:
        """Return the element type of the keys and values, as the decoder reads them."""
        properties = self.properties(job)["encode"]
        return job.config.kv_cache_precision or default_kv_type(get_core(), job.device, properties)


@dataclass(frozen=True)
class WindowKind(OneWindowKind[CrossWindowShape, WindowRunner]):
    """The kind of an encoder whose output a decoder sees through cross-attention."""

    decoder_file: str = ""
    """The IR of that decoder, in the same directory. The job's config names the encoder's."""
    name = "encoder of windows"
    shape = CrossWindowShape
    runner_class = WindowRunner

    @classmethod
    def fits(cls, model: ov.Model, directory: Path) -> bool:
        """Return whether the model reads features of windows, and nothing else."""
        del directory
        return [INPUT_FEATURES in port.get_names() for port in model.inputs] == [True]

    def lowered(self, job: LoadJob[Any], opened: OpenedModel) -> LoweredForOneWindow[CrossWindowShape]:
        """Join the encoder with what the decoder computes of its output."""
        decoder = read_model(get_core(), job.directory, model_file=self.decoder_file)
        return lower_cross_window(opened.model, decoder, self.kv_type(job))

    def random_call(self, programs: WindowPrograms, variant: CrossWindowVariant) -> Mapping[str, NDArray[Any]]:
        """Return noise in the range of log-mel spectrograms."""
        size = (1, programs.shape.bands, programs.shape.columns)
        return {INPUT_FEATURES: np.random.default_rng(0).uniform(-1, 1, size).astype(np.float32)}

    def choices(self, job: LoadJob[Any]) -> dict[str, Any]:
        """Return the type of keys and values, and the digest of the decoder, a part of which is in the program."""
        xml = job.directory / self.decoder_file
        digests = [file_digest(path) for path in (xml, xml.with_suffix(".bin"))]
        return {"kv_type": self.kv_type(job), "decoder": " ".join(digests)}


@dataclass(frozen=True)
class AlignmentKind(OneWindowKind[AlignmentShape, AlignmentRunner]):
    """The kind of a decoder whose cross-attention is wanted."""

    heads: tuple[tuple[int, int], ...] = ()
    """Layer and head of each."""
    rows: int = 0
    """The most tokens of a text."""
    name = "alignment of windows"
    shape = AlignmentShape
    runner_class = AlignmentRunner

    def check_graph(self, model: object, directory: object) -> None:
        """The same file is loaded as a decoder, which checks it."""

    def lowered(self, job: LoadJob[Any], opened: OpenedModel) -> LoweredForOneWindow[AlignmentShape]:
        """Lower the decoder for whole texts."""
        assert job.config.cross_windows is not None, "a decoder without cross-attention"
        return lower_alignment(
            opened.model, self.heads, self.rows, job.config.cross_windows.cross_window_len, self.kv_type(job)
        )

    def random_call(self, programs: AlignmentPrograms, variant: CrossWindowVariant) -> Mapping[str, NDArray[Any]]:
        """Return tokens about a window of noise."""
        shape = programs.shape
        rng = np.random.default_rng(0)
        sizes = {state.past_name: (1, state.heads, shape.cross_window_len, state.head_dim) for state in shape.states}
        types = {state.past_name: np.float16 if state.kv_type == "f16" else np.float32 for state in shape.states}
        noise = {name: rng.uniform(-1, 1, size).astype(types[name]) for name, size in sizes.items()}
        return {INPUT_IDS: np.arange(shape.rows, dtype=np.int64)[None] % 32, **noise}

    def choices(self, job: LoadJob[Any]) -> dict[str, Any]:
        """Return the heads, the rows, and the type of keys and values."""
        return {"heads": [list(each) for each in self.heads], "rows": self.rows, "kv_type": self.kv_type(job)}
