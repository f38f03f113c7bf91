"""Compares the prompts of our template renderer with GenAI's."""

from __future__ import annotations

import openvino_genai as genai
import pytest

from staticllm import demo_model_path
from staticllm.pipelines.conversation.chat_template import render

CONVERSATIONS = {
    "one turn": [{"role": "user", "content": "Hi"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    "turns": [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": " naïve café? "},
        {"role": "assistant", "content": "Yes <b>&\"'"},
        {"role": "user", "content": "你好"},
    ],
}
TEMPLATES = {
    "chatml": "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "trimmed": "{{ bos_token }}\n{% for m in messages %}\n  {%- if m.role == 'user' %}\n  [U] {{ m.content | trim }}\n"
    "  {%- else %}\n    [{{ m.role | upper }}] {{ m['content'] | trim }}{{ eos_token }}\n  {% endif %}\n{% endfor %}\n"
    "{%- if add_generation_prompt -%}\n  [A]\n{%- endif %}\n",
    "default system": "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}<s>default</s>{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}{% if not loop.last %}|{% endif %}{% endfor %}",
    "system split off": "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}{{ system }}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{{ m.role ~ ':' ~ m.content }}{% endfor %}",
    "no system": "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}",
    "system ignored": "{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content }}{% elif m.role == 'assistant' %}"
    "A:{{ m.content }}{% endif %}{% endfor %}",
    "parts": "{% for m in messages %}{{ m.role }}:{% for part in m.content %}{{ part.text }}{% endfor %};{% endfor %}",
    "macro and namespace": "{% macro say(m, n=1) %}({{ n }} {{ m.role }}: {{ m.content }}){% endmacro %}"
    "{% set ns = namespace(count=0) %}{% for m in messages %}{% set ns.count = ns.count + 1 %}{{ say(m, ns.count) }}"
    "{% endfor %}{{ ns.count }}",
    "json": "{{ messages | tojson }}{{ messages[0].content | tojson }}{{ messages | length }}",
    "tools": "{% if tools %}T{% else %}-{% endif %}{% if tools is defined and tools is not none %}t{% endif %}"
    "{% for m in messages %}{{ m.content }}{{ '' if loop.last else ', ' }}{% endfor %}",
    "strings": "{% for m in messages %}{{ m.content.strip() }}{{ m.content.startswith('B') }}"
    "{{ m.content.split(' ') | join('_') }}{{ 'x' if m.content is string }}{{ m.get('name', 'none') }}{% endfor %}",
    "slices": "{{ messages[-1].content }}{{ messages[::-1][0].role }}{% for m in messages[:1] %}{{ loop.index }}{% endfor %}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "comments": "{# a comment #}\n{%- set x = 1 -%}\n{{- x + 1 }} {{ 7 // 2 }} {{ 7 % 4 }} {{ not false and true }}\n"
    "{% for m in messages if m.role == 'user' %}\n{{ m.content }}\n{% endfor %}",
}


@pytest.fixture(scope="module")
def tokenizer():
    return genai.Tokenizer(demo_model_path())


def ours(tokenizer, template, messages, **options):
    tokens = {
        "bos_token": tokenizer.get_bos_token(),
        "eos_token": tokenizer.get_eos_token(),
        "pad_token": tokenizer.get_pad_token(),
    }
    return render(template, messages, tokens, **options)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_typical_templates_give_genais_prompts(tokenizer, name, conversation):
    messages, template = CONVERSATIONS[conversation], TEMPLATES[name]
    for wants_more in (True, False):
        theirs = tokenizer.apply_chat_template(messages, wants_more, chat_template=template)
        assert ours(tokenizer, template, messages, add_generation_prompt=wants_more) == theirs


def test_templates_of_models_give_genais_prompts(zoo, in_full):
    folders = sorted(path for path in zoo.iterdir() if path.is_dir())
    for folder in (demo_model_path(), *folders[: None if in_full else 5]):
        tokenizer = genai.Tokenizer(folder)
        for messages in CONVERSATIONS.values():
            theirs = tokenizer.apply_chat_template(messages, True)
            assert ours(tokenizer, tokenizer.chat_template, messages) == theirs, folder.name


def test_extra_context_of_a_history_reaches_the_template(tokenizer):
    template = "{{ mode }}{{ enable_thinking }}{{ messages[0].content }}"
    context = {"mode": "x", "enable_thinking": False}
    theirs = tokenizer.apply_chat_template(
        CONVERSATIONS["one turn"], True, chat_template=template, extra_context=context
    )
    assert ours(tokenizer, template, CONVERSATIONS["one turn"], extra_context=context) == theirs
