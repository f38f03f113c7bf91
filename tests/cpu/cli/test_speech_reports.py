"""Tests what the commands say of a speech model, each of whose programs is a part: inspect, plan, verify, compile and doctor."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support import command_line
from support.models.whisper_directory import sound, write_whisper
from support.npu_compiler.priced import PricedCompiler

from staticllm import StaticWhisperPipeline
from staticllm.compiler_passes.compiling.npu_platform import PLATFORMS
from staticllm.devices import check_known
from staticllm.errors import ConfigError
from staticllm.pipelines.diagnostics import speech_diagnosis
from staticllm.pipelines.diagnostics.kinds import diagnosis_of, jobs_in, verdicts_of
from staticllm.pipelines.loading.npu_target import NPUTarget
from staticllm.pipelines.speech.speech_files import speech_files

PARTS = ["encoder_model", "decoder_model"]
EXACT = {"INFERENCE_PRECISION_HINT": "f32"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_whisper(tmp_path_factory.mktemp("whisper"))


def json_of(*arguments):
    done = command_line.in_here(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_inspect_and_plan_describe_each_part(directory):
    found = json_of("inspect", directory)
    assert list(found) == PARTS
    assert [part["kind"] for part in found.values()] == ["encoder of windows", "decoder"]
    assert found["decoder_model"]["num_states"] == 4
    text = command_line.in_here("plan", directory).stdout
    assert "== encoder_model" in text and "== decoder_model" in text and "it fits" in text
    measured = command_line.in_here("plan", directory, "--measured").stdout
    assert "encode[1 window]" in measured and "tokens/s" not in measured.split("== decoder_model")[0]


def test_verify_compares_a_text_about_a_window_with_the_original(directory, tmp_path):
    found = json_of("verify", directory)
    assert found["ok"] and [check["check"].split(":")[0] for check in found["checks"]] == ["separate", "shared"]
    jobs = jobs_in(directory, "CPU", {})
    donor = speech_files(write_whisper(tmp_path / "donor", seed=7))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speech_diagnosis, "speech_files", lambda directory: donor)
        (verdict,) = verdicts_of(jobs, ("separate",))
    assert not verdict.is_ok, "the original is another model"


def test_a_compiled_set_holds_all_parts_and_writes_the_same_text(directory, tmp_path):
    target = tmp_path / "sets"
    done = command_line.in_here(
        "compile", directory, "--export-blob", target, "--precision", "f32", "-p", "WORD_TIMESTAMPS=NO"
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in target.iterdir()) == sorted(PARTS)
    speech = sound(2.5, 3)
    with StaticWhisperPipeline(directory, **EXACT) as pipe:
        expected = pipe.generate(speech, max_new_tokens=12).texts
    with StaticWhisperPipeline(directory, BLOB_PATH=str(target), **EXACT) as pipe:
        assert pipe.generate(speech, max_new_tokens=12).texts == expected
    again = command_line.in_here("compile", directory, "--export-blob", target)
    assert again.returncode == 1 and "exists already" in again.stderr
    refused = command_line.in_here("compile", directory, "--export-blob", tmp_path / "x", "--verify")
    assert refused.returncode == 1 and "staticllm verify MODEL" in refused.stderr
    assert not (tmp_path / "x").exists()


def test_in_blocks_it_writes_the_same_text(directory):
    """As on NPUs: the encoder's host part hands its features over, and its layers are blocks."""
    speech = sound(1.7, 5)
    found = []
    for programs in ("auto", "blocks"):
        with StaticWhisperPipeline(directory, PROGRAMS=programs, **EXACT) as pipe:
            found.append(pipe.generate(speech, max_new_tokens=12).texts)
    assert found[0] == found[1]


def test_all_parts_are_compiled_for_an_npu_elsewhere(directory):
    target = NPUTarget(PLATFORMS["4000"], (PricedCompiler(),))
    for name, job in jobs_in(directory, "NPU", {}, check=check_known).items():
        report = diagnosis_of(job.kind.name).estimate_on_npu(replace(job, target=target))
        assert report.compiled.programs and report.compiled.programs[0].num_calls >= 1, name


def test_doctor_loads_it_and_lets_it_hear_something(directory):
    done = command_line.in_here("doctor", directory, "--device", "CPU")
    assert "complete, a speech model, loaded and run on CPU" in done.stdout, done.stdout


def test_options_of_other_pipelines_are_refused(directory):
    with pytest.raises(ConfigError, match="no meaning for speech"):
        jobs_in(directory, "CPU", {"PROMPT_LOOKUP": True})
    with pytest.raises(ConfigError, match="WORD_TIMESTAMPS=3"):
        jobs_in(directory, "CPU", {"word_timestamps": 3})
    assert list(jobs_in(directory, "CPU", {"MAX_WINDOWS": 2})) == PARTS
