"""Tests with which versions of transformers the hints are on."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import pytest

import staticllm


@pytest.fixture(scope="module")
def hints():
    """The module by its file: to import its package attaches this program, and with it all other tests."""
    spec = importlib.util.spec_from_file_location(
        "hints_alone", Path(staticllm.__file__).parent / "attach" / "hints.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
def test_a_version_counts_by_its_first_two_numbers(hints, monkeypatch, version, is_on):
    monkeypatch.delenv("STATICLLM_HINTS", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(__version__=version))
    assert hints._is_on() is is_on
