"""Tests that ``staticllm verify`` passes a correctly lowered model and fails wrong ones."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from staticllm.cli import cli
from staticllm.pipelines.diagnostics.decoder_diagnosis import TOLERANCE
from staticllm.pipelines.diagnostics.reference import StatefulReference
from staticllm.pipelines.programs.model_runner import ModelRunner

pytestmark = pytest.mark.usefixtures("shared_programs")


def verify(*arguments):
    return CliRunner().invoke(cli, ["verify", *map(str, arguments)])


def test_a_correctly_lowered_model_passes(zoo):
    result = verify(zoo / "qwen3", "--programs", "shared")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "the same as the original"
    assert len(result.stdout.splitlines()) == 2 * 6 + 1
    report = json.loads(verify(zoo / "qwen3", "--programs", "shared", "--json").stdout)
    assert report["ok"]
    assert all(check["is_ok"] for check in report["checks"])
    assert 0 < report["checks"][0]["value"] < TOLERANCE
    assert report["checks"][3]["value"] == 1.0


def test_wrong_logits_and_wrong_tokens_fail_the_check(zoo, monkeypatch):
    """The logits differ first by more than the tolerance, and then by enough to change a token."""
    decode = ModelRunner.decode

    def spoiled(self, sequence, token):
        logits = decode(self, sequence, token).copy()
        if len(sequence) == 60:
            logits[5] += 0.01 * (logits.max() - logits.min()) if len(sequence.tokens) % 2 else 1e3
        return logits

    monkeypatch.setattr(ModelRunner, "decode", spoiled)
    result = verify(zoo / "qwen3", "--programs", "shared", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert not report["ok"]
    bad = {check["check"].split(": ")[1] for check in report["checks"] if not check["is_ok"]}
    assert bad == {"logits", "40 tokens"}, "only what passes 60 tokens one by one"
    (detail, *_) = [check["detail"] for check in report["checks"] if check["check"].endswith("40 tokens")]
    assert "token 20 is 5" in detail


def test_the_reference_runs_the_original_ir(zoo):
    """The reference runs the stateful IR, which no pass has changed."""
    reference = StatefulReference(zoo / "qwen3")
    whole = reference.logits(list(range(20, 40)))
    reference.reset()
    parts = [reference.logits([token])[0] for token in range(20, 40)]
    assert max(float(abs(a - b).max()) for a, b in zip(whole, parts, strict=True)) < 1e-4


@pytest.mark.parametrize(
    ("arguments", "word"), [(["no/such/model"], "no model directory"), (["--device", "TPU"], "TPU")]
)
def test_bad_input_is_a_one_line_error(zoo, arguments, word):
    path = [] if not arguments[0].startswith("--") else [zoo / "qwen3"]
    result = verify(*path, *arguments)
    assert result.exit_code == 1
    assert word in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
