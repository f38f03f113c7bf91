"""Tests that docs/migration.md tells of every field of openvino_genai's GenerationConfig, and names a test or a reason."""

import re

import openvino_genai as genai


def test_every_field_has_a_test_or_a_reason(root):
    page = (root / "docs" / "migration.md").read_text(encoding="utf-8")
    table = page.split("### Every field of GenAI's `GenerationConfig`")[1].split("\n## ")[0]
    held = {}
    for names, by in re.findall(r"^\| (`[^|]+) \| ([^|]+) \|$", table, re.MULTILINE):
        held.update(dict.fromkeys(re.findall(r"`(\w+)`", names), by))
    config = genai.GenerationConfig()
    fields = {name for name in dir(config) if not name.startswith(("_", "is_")) and not callable(getattr(config, name))}
    assert set(held) == fields
    for name, by in held.items():
        if by.startswith("`tests/"):
            assert (root / by.strip("`")).is_file(), f"{name}: there is no {by}"
        else:
            assert by.startswith("refused: ")
