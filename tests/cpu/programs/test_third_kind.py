"""Tests that a new kind of model is one registration: a tiny encoder of sound is compiled, stored, measured and served.

The second kind, of echoes, is a model in two graphs.
"""

from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from support.models.sound_kind import BANDS, WEIGHTS, WIDTH, SoundKind, SoundVariant, written

from staticllm.cli import cli
from staticllm.config import StaticLLMConfig
from staticllm.core import CrossWindows
from staticllm.devices import check_device
from staticllm.errors import BlobError, quoted
from staticllm.kinds import KINDS, FilesInParts, KnownKind, register
from staticllm.model_paths.path_kind import path_kind
from staticllm.pipelines.diagnostics.diagnosis import Diagnosis, Jobs, Trial
from staticllm.pipelines.diagnostics.kinds import diagnosis_of
from staticllm.pipelines.loading.export import export_set
from staticllm.pipelines.loading.kind import LoadJob
from staticllm.pipelines.loading.load import load_job


class SoundDiagnosis(Diagnosis):
    needs_tokenizer = False


class EchoDiagnosis(Diagnosis):
    """The questions about a model in two graphs: both are sound models."""

    def jobs(self, directory, device, properties, on_progress=lambda event: None, check=check_device):
        files = (f"echo_{part}.xml" for part in ("near", "far"))
        configs = (StaticLLMConfig(cross_windows=CrossWindows(file, 1, 1)) for file in files)
        jobs = (LoadJob(SoundKind(), directory, device, config, on_progress) for config in configs)
        return Jobs(self, dict(zip(("near", "far"), jobs, strict=True)))

    def what(self, directory):
        return "an echo model"

    def try_model(self, directory, device, on_progress):
        for job in self.jobs(directory, device, {}, on_progress).values():
            self.try_out(job)
        return Trial(" in two parts")


@pytest.fixture(autouse=True)
def kinds():
    files = FilesInParts((r"echo_(near|far)\.xml", r"echo\.json"), "holds an echo model", "shout at {model}")
    own = (
        KnownKind(SoundKind.name, "SoundPipeline", SoundKind, SoundDiagnosis),
        KnownKind("echo model", "EchoPipeline", diagnosis=EchoDiagnosis, files=files),
    )
    for kind in own:
        register(kind)
    yield
    for kind in own:
        del KINDS[kind.name]


@pytest.fixture
def job(tmp_path):
    folder = written(tmp_path / "model", "openvino_model.xml")
    return LoadJob(SoundKind(), folder, "CPU", StaticLLMConfig(), lambda event: None)


@pytest.mark.parametrize("programs", ["separate", "shared"])
def test_a_third_kind_is_loaded_stored_and_imported_by_the_code_of_the_others(job, programs, tmp_path):
    config = StaticLLMConfig(programs=programs, device_properties={"INFERENCE_PRECISION_HINT": "f32"})
    sounds = [np.random.default_rng(n).standard_normal((BANDS, n), np.float32) for n in (3, 16, 40)]
    job = replace(job, config=config, on_progress=(events := []).append)
    assert len(export_set(job, tmp_path / "set").blobs) == (1 if programs == "shared" else 2)
    origins, cache = [], {"cache_dir": str(tmp_path / "cache")}
    for place in ({}, cache, cache, {"blob_path": str(tmp_path / "set")}):
        loaded = load_job(replace(job, config=replace(config, **place)))
        origins.append(loaded.programs_from)
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


def test_a_third_kind_is_examined(job):
    result = CliRunner().invoke(cli, ["doctor", "-m", str(job.directory), "--device", "CPU"])
    assert "a sound model, loaded and run on CPU" in result.output, result.output


def test_a_kind_in_parts_goes_through_the_commands(tmp_path):
    written(folder := tmp_path / "echo", "echo_near.xml")
    assert path_kind(folder).kind.name == "other openvino", "one of its files is missing"
    written(folder, "echo_far.xml")
    (folder / "echo.json").write_text("{}")
    assert path_kind(folder).problem == f"{quoted(folder)} holds an echo model: shout at {folder}"
    for arguments, text in {
        ("inspect",): "== near",
        ("plan",): "== far",
        ("verify",): "the same as the original",
        ("compile", "--export-blob", str(tmp_path / "set")): f"in {tmp_path / 'set' / 'far'}",
        ("doctor",): "complete, an echo model, loaded and run on CPU",
    }.items():
        result = CliRunner().invoke(cli, [arguments[0], str(folder), *arguments[1:]])
        assert text in result.output, result.output
        assert result.exit_code == 0, result.output
    refused = CliRunner().invoke(cli, ["compile", str(folder), "--verify", "--export-blob", str(tmp_path / "other")])
    assert "`staticllm verify MODEL` compares an echo model" in refused.output
    result = CliRunner().invoke(cli, ["bench", str(folder)])
    assert "shout at" in result.output
