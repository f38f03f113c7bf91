"""Tests that docs/generation.md tells of every field of openvino_genai's GenerationConfig, and names tests that use it."""

import re

import openvino_genai as genai


def test_every_field_has_a_test_or_a_reason(root):
    page = (root / "docs" / "generation.md").read_text(encoding="utf-8")
    table = page.split("## Every field of GenAI's `GenerationConfig`")[1]
    held = {}
    for names, by in re.findall(r"^\| (`[^|]+) \| ([^|]+) \|$", table, re.MULTILINE):
        held.update(dict.fromkeys(re.findall(r"`(\w+)`", names), by))
    config = genai.GenerationConfig()
    fields = {name for name in dir(config) if not name.startswith(("_", "is_")) and not callable(getattr(config, name))}
    assert set(held) == fields
    for name, by in held.items():
        if by.startswith("`tests/"):
            assert name in (root / by.strip("`")).read_text(encoding="utf-8"), f"{by} does not use {name}"
        else:
            assert by.startswith("refused: ")
