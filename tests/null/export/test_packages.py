"""Tests the versions of the environment for exports: those of set-up, of the extra, and what an own environment may have."""

from __future__ import annotations

import tomllib
from importlib.metadata import version

import pytest
from support.export.stub_python import right_versions

from staticllm.export.packages import OTHERS, PACKAGES, TORCH, installations, mismatches, numbers


def test_the_extra_has_the_bounds_of_the_packages(root):
    extras = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert set(extras["export"]) == {package.bounds for package in PACKAGES}
    assert "staticllm[export]" in extras["train"]


def test_every_tested_version_is_within_its_bounds():
    assert all(package.takes(package.tested) for package in PACKAGES)
    assert mismatches(right_versions()) == []


def test_torch_is_installed_first_and_optimum_without_what_it_requires():
    first, second, third = installations()
    assert first == (TORCH.pinned,)
    assert second[0] == "--no-deps"
    assert all(name.startswith("optimum") for name in second[1:])
    assert {package.pinned for package in OTHERS} < set(third)
    assert f"openvino=={version('openvino')}" in third


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"torch": None}, "torch is missing, torch>=2.13,<3 is needed"),
        ({"torch": "2.4.1+cu124"}, "torch is 2.4.1+cu124"),
        ({"transformers": "5.6.0"}, "transformers is 5.6.0, transformers>=5.5,<5.6"),
        ({"openvino": "2025.1.0"}, "as in staticllm's environment"),
        ({"openvino-tokenizers": None}, "openvino-tokenizers is missing"),
        ({"nncf": "nonsense"}, "nncf is nonsense"),
    ],
)
def test_another_version_is_named_with_what_is_needed(changed, words):
    (found,) = mismatches({**right_versions(), **changed})
    assert words in found


def test_numbers_end_at_the_local_part():
    assert numbers("2.13.0+cpu") == (2, 13, 0)
    assert numbers("2026.4.1.0rc1") == (2026, 4, 1, 0)
