"""Tests that a first tensor is read while modules are imported: two threads that read theirs at one moment hang the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys
from staticllm import devices
seen, read = [], devices.read_first_tensor
devices.read_first_tensor = lambda: (seen.append(1), read())
import {module}
sys.exit(not seen)
"""


@pytest.mark.parametrize(
    "module",
    [
        "staticllm.pipelines.llm_pipeline",
        "staticllm.pipelines.text_embedding_pipeline",
        "staticllm.pipelines.text_rerank_pipeline",
        "staticllm.daemon.process.daemon",
    ],
)
def test_a_first_tensor_is_read_on_import(module):
    assert subprocess.run([sys.executable, "-c", CODE.format(module=module)], check=False).returncode == 0
