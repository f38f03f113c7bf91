"""Runs every example of docs/generation.md, one after the other, with the names that the page leaves to the reader."""

from __future__ import annotations

import re

import numpy as np
import openvino_genai as genai
import pytest

from staticllm import StaticLLMPipeline, demo_model_path

pydantic = pytest.importorskip("pydantic")
pytest.importorskip("llguidance")

TEMPLATE = (
    '{% for t in tools or [] %}{{ t | tojson }} <tool_call>{"name": "f", "arguments": {}}</tool_call>{% endfor %}'
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


def test_every_example_runs(root):
    page = (root / "docs" / "generation.md").read_text(encoding="utf-8")
    first, *blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(blocks) > 10
    tokenizer = genai.Tokenizer(str(demo_model_path()))
    tokenizer.chat_template = TEMPLATE
    names = {
        "np": np, "openvino_genai": genai, "pydantic": pydantic, "prompt": "Hello. Hello. Hello.",
        "schema": '{"type": "object", "properties": {"city": {"enum": ["Berlin"]}}, "required": ["city"]}',
        "weather": lambda **_: "sunny", "path": demo_model_path(), "small": demo_model_path(),
    }  # fmt: skip
    exec(compile(first, "generation.md, first lines", "exec"), names)
    names["pipe"].close()
    plain = names["pipe"] = StaticLLMPipeline(demo_model_path(), "CPU", tokenizer=tokenizer)
    opened = {plain}
    try:
        for number, block in enumerate(blocks):
            names["pipe"] = plain if number and "StaticLLMPipeline(" not in block else names["pipe"]
            exec(compile("import staticllm\n" + block, f"generation.md, example {number + 1}", "exec"), names)
            opened.add(names["pipe"])
    finally:
        for pipe in opened:
            pipe.close()
