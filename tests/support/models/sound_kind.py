"""A kind of model in one module: a tiny encoder of sound, how it is lowered, its variants, and what runs it."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from staticllm.compiler_passes.compiling.compile import CompilePlan
from staticllm.core import Size
from staticllm.pipelines.costs.model import CostModel
from staticllm.pipelines.loading.kind import ProgramKind
from staticllm.pipelines.programs.bind import BoundRequest

BANDS, WIDTH = 8, 4
WEIGHTS = np.random.default_rng(1).standard_normal((WIDTH, BANDS), np.float32)


@dataclass(frozen=True, order=True)
class SoundVariant:
    rows: Size
    phase: ClassVar[str] = "encode"
    WORK_SECONDS: ClassVar[tuple[float, float]] = (1e-3, 1e-5)

    @property
    def work(self):
        return 1.0, self.rows


@dataclass(frozen=True)
class SoundShape:
    bands: Size
    width: Size


@dataclass(frozen=True)
class LoweredSound:
    model: ov.Model
    shape: SoundShape
    reports: tuple = ()

    def specialise(self, variant, is_static=True):
        return self.share((variant,))

    def share(self, variants):
        model = self.model.clone()
        model.reshape([1, self.shape.bands, ov.Dimension(min(variants).rows, max(variants).rows)])
        return model


class SoundRunner:
    def __init__(self, programs):
        self.sizes, self.programs = programs.shape, programs.compiled
        self.costs = CostModel(programs.costs)
        for variant in sorted(self.programs):
            self.costs.set(variant, self._bound(variant, np.zeros((1, BANDS, variant.rows), np.float32))[1])

    def run(self, frames):
        variant = min(each for each in self.programs if each.rows >= frames.shape[1])
        padded = np.pad(frames[None], ((0, 0), (0, 0), (0, variant.rows - frames.shape[1])))
        return self._bound(variant, padded)[0]

    def _bound(self, variant, frames):
        found = np.zeros((1, self.sizes.width), np.float32)
        ports = {"frames": ov.Tensor(frames, shared_memory=True), "features": ov.Tensor(found, shared_memory=True)}
        return found[0], BoundRequest(self.programs[variant], ports).run()


@dataclass(frozen=True)
class SoundKind(ProgramKind):
    sizes: tuple = (16, 64)
    name = "sound model"
    variant, shape = SoundVariant, SoundShape

    @classmethod
    def fits(cls, model, directory):
        return "frames" in {port.get_any_name() for port in model.inputs}

    def lower(self, job, opened, start):
        lowered = LoweredSound(opened.model, SoundShape(BANDS, WIDTH))
        return CompilePlan(lowered, self.options(job), tuple(map(SoundVariant, self.sizes)), opened.weights)

    def random_call(self, programs, variant):
        return {"frames": np.random.default_rng(0).standard_normal((1, BANDS, variant.rows), np.float32)}

    def runner(self, job, programs, memory, planned=()):
        return SoundRunner(programs)

    def choices(self, job):
        return {"sizes": list(self.sizes)}


def written(folder, name):
    frames = ops.parameter([1, BANDS, -1], np.float32)
    summed = ops.reduce_sum(ops.tanh(ops.matmul(ops.constant(WEIGHTS), frames, False, False)), np.array([2]))
    summed.output(0).set_names({"features"})
    frames.output(0).set_names({"frames"})
    folder.mkdir(exist_ok=True)
    ov.save_model(ov.Model([summed], [frames]), str(folder / name), compress_to_fp16=False)
    return folder
