"""Tests that a new kind of model is three functions: a tiny encoder of sound is compiled, stored, imported and measured."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import openvino as ov
import pytest
from click.testing import CliRunner
from openvino import opset13 as ops

from staticllm.cli import cli
from staticllm.compiler_passes.compiling.compile import CompilePlan
from staticllm.compiler_passes.compiling.kinds import KINDS, register
from staticllm.config import StaticLLMConfig
from staticllm.core import Size
from staticllm.errors import BlobError
from staticllm.pipelines.costs.model import CostModel
from staticllm.pipelines.diagnostics.kinds import diagnosis_of
from staticllm.pipelines.loading.export import export_set
from staticllm.pipelines.loading.kind import LoadJob, ProgramKind
from staticllm.pipelines.loading.load import load_job
from staticllm.pipelines.programs.bind import BoundRequest

BANDS, WIDTH = 8, 4
WEIGHTS = np.random.default_rng(1).standard_normal((WIDTH, BANDS), np.float32)


@dataclass(frozen=True, order=True)
class SoundVariant:
    rows: Size
    phase: ClassVar[str] = "encode"


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

    def lower(self, job, source, start):
        lowered = LoweredSound(source.model, SoundShape(BANDS, WIDTH))
        return CompilePlan(lowered, self.options(job), tuple(map(SoundVariant, self.sizes)), source.weights)

    def random_call(self, programs, variant):
        return {"frames": np.random.default_rng(0).standard_normal((1, BANDS, variant.rows), np.float32)}

    def runner(self, job, programs, memory, planned=()):
        return SoundRunner(programs)

    def choices(self, job):
        return {"sizes": list(self.sizes)}


@pytest.fixture
def job(tmp_path):
    register(SoundKind.name, SoundKind, "SoundPipeline")
    frames = ops.parameter([1, BANDS, -1], np.float32)
    summed = ops.reduce_sum(ops.tanh(ops.matmul(ops.constant(WEIGHTS), frames, False, False)), np.array([2]))
    summed.output(0).set_names({"features"})
    frames.output(0).set_names({"frames"})
    (folder := tmp_path / "model").mkdir()
    ov.save_model(ov.Model([summed], [frames]), str(folder / "openvino_model.xml"), compress_to_fp16=False)
    yield LoadJob(SoundKind(), folder, "CPU", StaticLLMConfig(), lambda event: None)
    del KINDS[SoundKind.name]


@pytest.mark.parametrize("programs", ["separate", "shared"])
def test_a_third_kind_is_loaded_stored_and_imported_by_the_code_of_the_others(job, programs, tmp_path):
    config = StaticLLMConfig(programs=programs, device_properties={"INFERENCE_PRECISION_HINT": "f32"})
    sounds = [np.random.default_rng(n).standard_normal((BANDS, n), np.float32) for n in (3, 16, 40)]
    job = replace(job, config=config, on_progress=(events := []).append)
    assert len(export_set(job, tmp_path / "set").blobs) == (1 if programs == "shared" else 2)
    origins, cache = [], {"cache_dir": str(tmp_path / "cache")}
    for place in ({}, cache, cache, {"blob_path": str(tmp_path / "set")}):
        loaded = load_job(replace(job, config=replace(config, **place)))
        origins.append(loaded.origin)
        for sound in sounds:
            np.testing.assert_allclose(loaded.runner.run(sound), np.tanh(WEIGHTS @ sound).sum(axis=1), atol=1e-4)
        assert set(loaded.runner.costs.measured) == {SoundVariant(16), SoundVariant(64)}
    assert origins == ["compiled", "compiled", "cache", "blob"]
    assert {"compile", "export", "import"} <= {event.stage for event in events}


def test_a_set_of_a_third_kind_is_for_its_choices_and_its_kind_only(job, tmp_path):
    export_set(job, tmp_path / "set")
    other = type("Other", (SoundKind,), {"name": "other"})()
    for kind, text in ((SoundKind((32,)), r'choices \{"sizes": \[32\]\} asked'), (other, "are of a sound model")):
        with pytest.raises(BlobError, match=text):
            load_job(replace(job, kind=kind, config=StaticLLMConfig(blob_path=str(tmp_path / "set"))))


def test_a_third_kind_goes_through_the_commands_and_questions(job, tmp_path):
    for arguments, text in {
        ("inspect",): "kind      sound model",
        ("plan", "--json"): f'"buffers": {4 * sum(BANDS * rows + WIDTH for rows in (16, 64))}',
        ("plan", "--measured"): "SoundVariant(rows=64)",
        ("verify",): "the same as the original",
        ("compile", "--verify", "--export-blob", str(tmp_path / "set")): "verified: 2 calls, cosine 1.000000",
    }.items():
        result = CliRunner().invoke(cli, [arguments[0], str(job.directory), *arguments[1:]])
        assert text in result.output, result.output
        assert result.exit_code == 0, result.output
    diagnosis = diagnosis_of(SoundKind.name)
    assert [bool(each.seconds) for each in diagnosis.measure(job).variants] == [True] * 2
    assert [each.is_ok for each in diagnosis.verdicts(job, ("separate", "shared"))] == [True] * 4
    assert diagnosis.agreement(job).is_ok
