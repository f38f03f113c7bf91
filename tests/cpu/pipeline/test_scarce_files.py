"""A process without file descriptors: the error does not blame the model's files, and the pipeline works again afterwards."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sets a limit of files")

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}S:{{ m.content }}{% else %}U:{{ m.content.strip() }}{% endif %}"
    "{% endfor %}A:"
)


def child():
    """Ask in a process without descriptors, then again with some, and compare with what another template gives."""
    import resource

    import openvino_genai as genai

    from staticllm import StaticLLMError
    from staticllm.testing import fake_pipeline

    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    grammar = genai.StructuredOutputConfig(regex="a+")
    calls = {
        "text": lambda pipe: pipe.generate("hello", max_new_tokens=2),
        "messages": lambda pipe: pipe.generate(messages, max_new_tokens=2),
        "stop": lambda pipe: pipe.generate("hello", max_new_tokens=2, stop_strings={"zz"}),
        "grammar": lambda pipe: pipe.generate("hello", max_new_tokens=4, structured_output_config=grammar),
        "beams": lambda pipe: pipe.generate("hello", max_new_tokens=2, num_beams=2),
        "embedded": lambda pipe: pipe.save_snapshot("none", "hello"),
    }
    pipe = fake_pipeline(MAX_PROMPT_LEN=128, MIN_RESPONSE_LEN=32)
    pipe.get_tokenizer().chat_template = TEMPLATE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    for name, call in calls.items():
        held = []
        while True:
            try:
                held.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
        try:
            call(pipe)
            said = "answered"
        except StaticLLMError as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            for descriptor in held:
                os.close(descriptor)
        assert "\n" not in said
        assert "template fails" not in said, said
        print(name, said)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for name, call in calls.items():
        if name != "embedded":
            call(pipe)
    from staticllm.pipelines.conversation.chat_template import shape_of

    assert shape_of(TEMPLATE).has_system, "what failed is not remembered"
    assert not shape_of(TEMPLATE).wants_parts
    print("works again")


def test_a_process_without_descriptors_blames_no_template_and_works_again():
    done = subprocess.run(
        [sys.executable, str(Path(__file__))], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "works again" in done.stdout


if __name__ == "__main__":
    child()
