"""Chat templates are foreign code: what they may do, where they end, and what is said about it."""

from __future__ import annotations

import time

import pytest

from staticllm import StaticLLMPipeline, demo_model_path
from staticllm.errors import PromptError
from staticllm.pipelines import template_bounds
from staticllm.pipelines.chat_template import MAX_TEMPLATE_CHARS, render

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
HELLO = [{"role": "user", "content": "Hi"}]


def rendered(template, messages=HELLO, **options):
    return render(template, messages, TOKENS, **options)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ bos_token }}{% for m in messages %}\n  {{ m.content }}\n{% endfor %}\n", "<s>  Hi\n"),
        ("{{ messages|tojson }}", '[{"role": "user", "content": "Hi"}]'),
        ("{{ {'a': 'é<'}|tojson(indent=1) }}", '{\n "a": "é<"\n}'),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "Hi"),
        ("{% set ns = namespace(n=0) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f('a') ~ f(1) }}", "[a][1]"),
        ("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}{{ foo }}", "TrueTrueTrue"),
        ("{{ strftime_now('%Y')|length }}{{ '%s-%03d' % ('a', 7) }}{{ '{:>3}'.format('b') }}", "4a-007  b"),
    ],
)
def test_what_templates_use(template, text):
    assert rendered(template) == text


def test_extra_context_and_tools_are_variables():
    assert rendered("{{ tools[0].name }}{{ mode }}", tools=[{"name": "f"}], extra_context={"mode": "x"}) == "fx"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("a\n\n{{ foo.bar }}", "fails in line 3: 'foo' is undefined"),
        ("a\n{% for %}", "fails in line 2: Expected"),
        ("{{ raise_exception('Roles must\nalternate') }}", "refuses the conversation: Roles must"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses without end"),
        ("{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", "recurses without end"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recurses without end"),
        ("{% for a in [1] %}" * 40 + "{% endfor %}" * 40, "nested"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ range(10 ** 9) }}", "Range too big"),
        ("{{ 'a' * 10 ** 9 }}", "text of 1e+09 characters"),
        ("{{ [1] * 10 ** 9 }}", "list of 1e+09 items"),
        ("{{ 10 ** 10 ** 9 }}{{ 10 ** 99999 }}", "power"),
        ("{% set a = [1] * 100000 %}{{ [a] * 100000 }}", "list of"),
        ("{% set a = [1] * 100000 %}{{ ([a] * 100000)|tojson }}", "list of"),
        ("{{ 'a'|center(10 ** 9) }}{{ 1 }}", "width of 1e+09"),
        ("{{ 'a'.ljust(10 ** 9) }}", "width of 1e+09"),
        ("{{ '%1000000000d' % 1 }}", "width of 1000000000"),
        ("{{ '%*d' % (10 ** 9, 1) }}", "width of 1e+09"),
        ("{{ '{:1000000000}'.format(1) }}", "width of 1000000000"),
        ("{{ '{0:{1}}'.format(1, 10 ** 9) }}", "width of 1e+09"),
        ("{{ ('a\n' * 100000)|indent(9999) }}", "text of"),
        ("{{ ('a' * 100000)|replace('a', 'b' * 100000) }}", "text of 1e+10"),
        ("{{ ('a' * 100000).replace('a', 'b' * 100000) }}", "text of 1e+10"),
        ("{{ (['a' * 100000] * 1000)|join }}", "text of"),
        ("{% for i in range(100000) %}{{ 'a' * 10000 }}{% endfor %}", "text of"),
    ],
)
def test_a_template_that_fails_says_where_and_why(template, said):
    start = time.monotonic()
    with pytest.raises(PromptError, match="the chat template") as raised:
        rendered(template)
    assert said in str(raised.value) and "\n" not in str(raised.value)
    assert time.monotonic() - start < 2


DOUBLING = "{%% set ns = namespace(x='0123456789') %%}{%% for i in range(99) %%}%s{%% endfor %%}{{ ns.x }}"


@pytest.mark.parametrize(
    "step",
    [
        "{% set ns.x = ns.x ~ ns.x %}",
        "{% set ns.x = ns.x + ns.x %}",
        "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}",
        "{% set ns.x = [ns.x, ns.x]|join %}",
        "{% set ns.x = '%s%s' % (ns.x, ns.x) %}",
        "{% set ns.x = '{0}{0}'.format(ns.x) %}",
    ],
)
def test_text_that_doubles_ends(step):
    with pytest.raises(PromptError, match="text of"):
        rendered(DOUBLING % step)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% set r = range(100000) %}{% for a in r %}{% for b in r %}{% for c in r if false %}{% endfor %}{% endfor %}"
        "{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_a_template_that_loops_is_stopped(template, monkeypatch):
    monkeypatch.setattr(template_bounds, "MAX_SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(PromptError, match=r"runs for more than 0.2 s"):
        rendered(template)
    assert time.monotonic() - start < 2


def test_a_template_may_be_only_so_long():
    with pytest.raises(PromptError, match="at most 65536"):
        rendered("a" * (MAX_TEMPLATE_CHARS + 1))


def test_the_pipeline_goes_on_after_a_bad_template():
    pipe = StaticLLMPipeline(demo_model_path(), "CPU", MAX_PROMPT_LEN=128, MIN_RESPONSE_LEN=64)
    tokenizer = pipe.get_tokenizer()
    good, expected = tokenizer.chat_template, pipe.generate("Hello!", max_new_tokens=6)
    tokenizer.set_chat_template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")
    with pytest.raises(PromptError, match="recurses"):
        pipe.generate("Hello!")
    pipe.start_chat()
    with pytest.raises(PromptError, match="recurses"):
        pipe.generate("Hello!")
    pipe.finish_chat()
    tokenizer.set_chat_template(good)
    assert pipe.generate("Hello!", max_new_tokens=6) == expected
