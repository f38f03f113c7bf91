"""Tests Ctrl-C in a process that has opened and closed pipelines."""

import os
import subprocess
import sys

import pytest

SIGINT_AFTER_PIPELINES = """
import os, signal, sys, time
import openvino_genai
from staticllm import StaticLLMPipeline, demo_model_path
for _ in range(3):
    pipe = StaticLLMPipeline(demo_model_path(), "CPU", MAX_PROMPT_LEN=64)
    pipe.generate("hi", max_new_tokens=2)
    del pipe
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT to itself")
def test_ctrl_c_works_after_pipelines_were_closed():
    """If Cores are destroyed out of order, OpenVINO leaves a freed signal stack behind, and Ctrl-C would kill the process."""
    done = subprocess.run(
        [sys.executable, "-c", SIGINT_AFTER_PIPELINES], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "interrupted\n")
