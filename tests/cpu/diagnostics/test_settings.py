"""Tests the descriptions of settings, and the times of those among which the calibration chooses."""

from __future__ import annotations

import os

import pytest

from staticllm.config import StaticLLMConfig
from staticllm.devices import check_known
from staticllm.pipelines.diagnostics.kinds import diagnosis_of, job_in
from staticllm.pipelines.diagnostics.settings import probe_times

SMALL = {"max_prompt_len": 128, "min_response_len": 64, "max_num_seqs": 2}


def test_a_devices_own_settings_are_named(model_path):
    def settings(device, **properties):
        given = {name.upper(): value for name, value in SMALL.items()} | properties
        job = job_in(model_path("demo"), device, given, check=check_known)
        return set(diagnosis_of("decoder").report(job).settings.values())

    assert settings("CPU", INFERENCE_PRECISION_HINT="f32") == {"f32, no quantization"}
    assert settings("NPU") == {"the device's own"}


@pytest.mark.skipif("ONEDNN_MAX_CPU_ISA" in os.environ, reason="the plugin has no such products under a limited ISA")
def test_probe_times_have_every_candidate(model_path):
    found = list(probe_times(model_path("demo"), "CPU", StaticLLMConfig(**SMALL)))
    assert [each.rows for each in found] == [1, 8, 32, 128]
    for each in found:
        assert {"f32, no quantization", "f32, groups of 128"} <= set(each.ms)
        assert min(each.ms.values()) > 0
    assert not list(probe_times(model_path("llama"), "CPU", StaticLLMConfig(**SMALL))), "its weights are not compressed"
