"""What the diagnostics return: frozen values, and the JSON of the commands is made of their fields."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields, is_dataclass

import pytest
from support import command_line

from staticllm import demo_model_path
from staticllm.devices import check_known
from staticllm.pipelines.diagnostics.kinds import diagnosis_of, job_in

PROPERTIES = {"MAX_PROMPT_LEN": 64, "MIN_RESPONSE_LEN": 64, "PROGRAMS": "shared"}
OPTIONS = ("--max-prompt-len", 64, "--min-response-len", 64, "--programs", "shared", "--json")


def parts_of(report):
    """A report and every dataclass in it."""
    yield report
    for item in fields(report):
        value = getattr(report, item.name)
        for part in value if isinstance(value, tuple) else (value,):
            if is_dataclass(part):
                yield from parts_of(part)


def described(question, device="CPU"):
    job = job_in(demo_model_path(), device, PROPERTIES, check=check_known)
    return getattr(diagnosis_of(job.kind.name), question)(job)


@pytest.mark.parametrize("question", ["report", "estimate"])
def test_a_report_cannot_be_changed(question):
    for part in parts_of(described(question)):
        with pytest.raises(FrozenInstanceError):
            setattr(part, fields(part)[0].name, None)


def test_json_of_inspect_has_the_fields_of_the_report():
    report = described("report", "NPU")
    printed = command_line.in_here("inspect", demo_model_path(), "--device", "NPU", *OPTIONS).stdout
    assert printed == json.dumps(report.as_dict(), indent=2) + "\n"
    content = json.loads(printed)
    assert set(content) == {
        "model", "kind", "device", "programs", "settings", "weights_bytes", "vocab_size", "num_states", "states", "recurrent",
        "num_programs", "is_packable", "rope_limits", "layers", "masks", "kv", "buffers_bytes", "passes", "max_num_seqs",
        "variants",
    }  # fmt: skip
    assert content["kv"] == {
        "type": report.kv.type,
        "num_slots": report.kv.num_slots,
        "bytes_a_token": report.kv.bytes_a_token,
        "bytes": report.kv.bytes_a_token * report.kv.num_slots,
        "host_bytes": report.kv.host_bytes,
    }
    assert [layer["mask"] for layer in content["layers"]] == [layer.mask for layer in report.layers]
    assert [list(variant) for variant in content["variants"]] == [["phase", "rows", "kv_len", "sequences"]] * len(
        report.variants
    )


def test_json_of_plan_has_the_fields_of_the_estimate():
    estimate = described("estimate")
    content = json.loads(json.dumps(estimate.as_dict()))
    assert set(content) == {
        "model", "device", "is_present", "programs", "variants", "bytes", "needed", "available", "fits",
    }  # fmt: skip
    assert content["needed"] == sum(content["bytes"].values()) == estimate.needed
    assert estimate.fits == (estimate.needed <= estimate.available)
    assert content["variants"][0]["mask_bytes"] == estimate.variants[0].mask_bytes > 0
