"""Tests Ctrl-C in a process that has opened and closed pipelines."""

import os
import signal
import subprocess
import sys

import pytest
from support.encoders.encoder_models import encoder_directory

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


SIGINT_AFTER_AN_ENCODER = """
import os, signal, sys, threading, time
from staticllm import StaticEmbeddingPipeline
pipe = StaticEmbeddingPipeline(sys.argv[1], "CPU")
pipe.embed_query("hi")
closing = threading.Thread(target=pipe.close)
closing.start()
closing.join()
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT to itself")
def test_ctrl_c_works_after_an_encoder_was_closed_on_another_thread(tmp_path):
    """The tokenizer's plugin unmapped the signal stack that it had registered for the thread which loaded it."""
    encoder_directory(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", SIGINT_AFTER_AN_ENCODER, str(tmp_path)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT to a child")
@pytest.mark.parametrize(
    "imported", ["staticllm.errors", "click.core", "numpy", "openvino._pyopenvino", "staticllm.core"]
)
def test_ctrl_c_while_the_command_is_imported_ends_it_quietly(imported):
    """The interpreter tells on stderr what it has imported; the signal arrives after that, among the next imports."""
    command = [sys.executable, "-X", "importtime", "-m", "staticllm", "run", "hi"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as child:
        for line in child.stderr:
            if line.rpartition("|")[2].strip() == imported:
                break
        child.send_signal(signal.SIGINT)
        rest = child.stderr.read()
    assert child.returncode in (130, -signal.SIGINT), rest
    said = [line for line in rest.splitlines() if line.strip() and not line.startswith("import time:")]
    assert not said, said
