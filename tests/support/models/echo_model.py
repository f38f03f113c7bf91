"""A model whose answer stands in the question, after ``ANSWER:``, so that tests can say what it answers.

Its chat template shows tools, and knows calls and reasoning.
"""

from __future__ import annotations

import openvino_genai as genai

from staticllm import StaticLLMPipeline, demo_model_path
from staticllm.testing import fake_pipeline

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    '{# <tool_call>{"name": "f", "arguments": {}}</tool_call> <think> </think> #}'
)
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome", "days": 2}}</tool_call>'


def tokenizer_with_tools():
    tokenizer = genai.Tokenizer(str(demo_model_path()))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def load_echo(device, properties, on_progress):
    return fake_pipeline(lambda prompt: prompt.rsplit("ANSWER:", 1)[1], tokenizer=tokenizer_with_tools())


def load_demo_with_tools(device, properties, on_progress):
    """Load the embedded model with this template; its calls are those that a grammar makes of it."""
    return StaticLLMPipeline(demo_model_path(), device, tokenizer=tokenizer_with_tools())


def asking(answer):
    return [{"role": "user", "content": f"Q ANSWER:{answer}"}]
