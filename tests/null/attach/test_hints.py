"""Tests with which versions of transformers the hints are on."""

from __future__ import annotations

import sys
import types

import pytest

from staticllm.attach import hints


@pytest.mark.parametrize(
    ("version", "is_on"),
    [
        ("5.5.4", True),
        ("5.5", True),
        ("5.5rc1", True),
        ("5.5.0.dev0", True),
        ("5.6rc1", False),
        ("5.6.0", False),
        ("5.50.0", False),
        ("5", False),
        ("5rc5", False),
        ("4.57.1", False),
        ("", False),
    ],
)
def test_a_version_counts_by_its_first_two_numbers(monkeypatch, version, is_on):
    monkeypatch.delenv("STATICLLM_HINTS", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(__version__=version))
    assert hints._is_on() is is_on
