"""Encoders of sound: models that make one vector of the frames of a sound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.compiler_passes.pass_pipeline import PassReport
from staticllm.config import StaticLLMConfig
from staticllm.core import OnProgress, Size, Work
from staticllm.pipelines.costs.model import CostModel
from staticllm.pipelines.loading.kind import LoadJob, ProgramKind, Source
from staticllm.pipelines.loading.load import load_job
from staticllm.pipelines.programs.bind import BoundRequest
from staticllm.pipelines.programs.compile import CompiledPrograms, CompilePlan, StartWith

FRAMES = "frames"
ROWS = (16, 64)


@dataclass(frozen=True, order=True)
class SoundVariant:
    """The size of a program: the most frames of a sound."""

    rows: Size

    WORK_SECONDS: ClassVar[Work] = (1e-3, 1e-4)

    @property
    def phase(self) -> str:
        return "encode"

    @property
    def work(self) -> Work:
        return 1.0, self.rows


@dataclass(frozen=True)
class SoundShape:
    """The values per frame, and the numbers of a vector."""

    bands: Size
    width: Size


@dataclass(frozen=True)
class LoweredSound:
    """A model with any number of frames, ``[1, bands, frames]``."""

    model: ov.Model
    shape: SoundShape
    reports: tuple[PassReport, ...] = ()

    def specialise(self, variant: SoundVariant, is_static: bool = True) -> ov.Model:
        return self.share((variant,))

    def share(self, variants: tuple[SoundVariant, ...]) -> ov.Model:
        model = self.model.clone()
        model.reshape([1, self.shape.bands, ov.Dimension(min(variants).rows, max(variants).rows)])
        return model


SoundPrograms: TypeAlias = CompiledPrograms[SoundVariant, SoundShape]


class SoundRunner:
    """Runs the programs. It is not thread-safe."""

    def __init__(self, programs: SoundPrograms) -> None:
        self.costs = CostModel[SoundVariant](programs.costs)
        self._programs = programs
        for variant in programs.compiled:
            self.costs.set(variant, self._request(variant, np.zeros((programs.shape.bands, 1), np.float32))[0].run())

    def run(self, frames: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the vector of ``frames [bands, n]``."""
        variant = min(each for each in self._programs.compiled if each.rows >= frames.shape[1])
        request, found = self._request(variant, frames)
        request.run()
        return found[0]

    def _request(self, variant: SoundVariant, frames: NDArray[np.float32]) -> tuple[BoundRequest, NDArray[np.float32]]:
        shape = self._programs.shape
        padded = np.zeros((1, shape.bands, variant.rows), np.float32)
        padded[0, :, : frames.shape[1]] = frames
        found = np.zeros((1, shape.width), np.float32)
        ports = {FRAMES: ov.Tensor(padded, shared_memory=True), "features": ov.Tensor(found, shared_memory=True)}
        return BoundRequest(self._programs.compiled[variant], ports), found


class SoundKind(ProgramKind[SoundVariant, SoundShape, SoundRunner]):
    """The kind of an encoder of sound."""

    name = "sound"
    variant = SoundVariant
    shape = SoundShape

    @classmethod
    def fits(cls, model: ov.Model, directory: Path) -> bool:
        return FRAMES in {port.get_any_name() for port in model.inputs}

    def lower(self, job: LoadJob[Any], source: Source, start: StartWith) -> CompilePlan[SoundVariant, SoundShape]:
        shape = SoundShape(
            source.model.input(0).partial_shape[1].get_length(), source.model.output(0).partial_shape[1].get_length()
        )
        return CompilePlan(
            LoweredSound(source.model, shape), self.options(job), tuple(map(SoundVariant, ROWS)), source.weights
        )

    def random_call(self, programs: SoundPrograms, variant: SoundVariant) -> Mapping[str, NDArray[Any]]:
        size = (1, programs.shape.bands, variant.rows)
        return {FRAMES: np.random.default_rng(0).standard_normal(size, np.float32)}

    def runner(
        self, job: LoadJob[Any], programs: SoundPrograms, memory: Any, planned: Sequence[SoundVariant] = ()
    ) -> SoundRunner:
        return SoundRunner(programs)


class SoundPipeline:
    """Makes vectors of sounds."""

    is_usable = True

    def __init__(self, path: Path, device: str = "CPU", on_progress: OnProgress = lambda event: None) -> None:
        self.run = load_job(LoadJob(SoundKind(), Path(path), device, StaticLLMConfig(), on_progress)).runner.run

    def close(self) -> None:
        """Release the device."""
        del self.run
