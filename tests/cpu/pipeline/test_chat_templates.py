"""Tests chat templates, which are foreign code: what they may do, their bounds, and their error messages."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from staticllm import StaticLLMPipeline, demo_model_path
from staticllm.errors import PromptError
from staticllm.pipelines.conversation import sandbox as bounds
from staticllm.pipelines.conversation.chat_template import render
from staticllm.pipelines.conversation.sandbox import MAX_TEMPLATE_CHARS

pytestmark = pytest.mark.usefixtures("shared_programs")

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
def test_templates_can_use_these_features(template, text):
    assert rendered(template) == text


def test_extra_context_and_tools_are_variables():
    assert rendered("{{ tools[0].name }}{{ mode }}", tools=[{"name": "f"}], extra_context={"mode": "x"}) == "fx"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("a\n\n{{ foo.bar }}", "fails in line 3: 'foo' is undefined"),
        ("a\n{% for %}", "fails in line 2: Expected"),
        ("{{ raise_exception('Roles must\nalternate') }}", "refuses the conversation: Roles must alternate"),
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
        ("{{ [1] * 200000 + [1] * 200000 }}", "list of 4e+05 items"),
        ("{{ 'a'.zfill(10 ** 9) }}", "width of 1e+09"),
        ("{{ 'a' * 1 ~ 'b'|indent(10 ** 9) }}", "width of 1e+09"),
        ("{{ 'a'|center(10 ** 9) }}{{ 1 }}", "width of 1e+09"),
        ("{{ 'a'.ljust(10 ** 9) }}", "width of 1e+09"),
        ("{{ '%1000000000d' % 1 }}", "width of 1e+09"),
        ("{{ '%*d' % (10 ** 9, 1) }}", "width of 1e+09"),
        ("{{ '{:1000000000}'.format(1) }}", "width of 1e+09"),
        ("{{ '{0:{1}}'.format(1, 10 ** 9) }}", "width of 1e+09"),
        ("{{ ('a\n' * 100000)|indent(9999) }}", "text of"),
        ("{{ ('a' * 100000)|replace('a', 'b' * 100000) }}", "text of 1e+10"),
        ("{{ ('a' * 100000).replace('a', 'b' * 100000) }}", "text of 1e+10"),
        ("{{ (['a' * 100000] * 1000)|join }}", "text of"),
        ("{% for i in range(100000) %}{{ 'a' * 10000 }}{% endfor %}", "text of"),
    ],
)
def test_a_failing_template_names_the_line_and_the_cause(template, said):
    start = time.monotonic()
    with pytest.raises(PromptError, match="the chat template") as raised:
        rendered(template)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
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
def test_text_that_keeps_doubling_is_stopped(step):
    with pytest.raises(PromptError, match="text of"):
        rendered(DOUBLING % step)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% set r = range(100000) %}{% for a in r %}{% for b in r %}{% for c in r if false %}{% endfor %}{% endfor %}"
        "{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f(n) %}{% if n %}{% set a = f(n - 1) %}{% set a = f(n - 1) %}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_a_template_that_loops_is_stopped(template, monkeypatch):
    monkeypatch.setattr(bounds, "MAX_SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(PromptError, match=r"runs for more than 0.2 s"):
        rendered(template)
    assert time.monotonic() - start < 2


ONE_MB = "('a' * 1000000)"
MEMORY = {
    "replace": f"{{{{ ('a' * 2000)|replace(old='a', new={ONE_MB}) }}}}",
    "map of replace": f"{{{{ ['a' * 2000]|map('replace', old='a', new={ONE_MB})|list|length }}}}",
    "filter block": "{% filter replace(old='a', new='b' * 1000000) %}" + "a" * 2000 + "{% endfilter %}",
    "%": "{{ ('%9999d' * 200000 % ((1,) * 200000))|length }}",
    "% with a dict": f"{{{{ ('%(a)s' * 2000 % {{'a': {ONE_MB}}})|length }}}}",
    "% of large floats": "{{ ('%f%f%f%f%f%f%f%f' * 30000 % ((1e308,) * 240000) * 1)|length }}",
    "format": "{{ ('{0:9999}' * 200000).format('a')|length }}",
    "format of a list": f"{{{{ ('{{0}}' * 2000).format([{ONE_MB}])|length }}}}",
    "tojson": "{{ ([1] * 200000)|tojson(indent=9999)|length }}",
    "tojson with text": f"{{{{ ([1] * 2000)|tojson(indent={ONE_MB})|length }}}}",
    "indent": f"{{{{ ('a\n' * 2000)|indent({ONE_MB})|length }}}}",
    "join of a filter": f"{{{{ {ONE_MB}.join(range(2000)|map('string'))|length }}}}",
    "large numbers in binary": "{{ ('{0:b}' * 400000).format(2 ** 2040)|length }}",
    "to_bytes": "{{ (1).to_bytes(2000000000, 'big')|length }}",
    "many texts": "{% set ns = namespace(l=[]) %}{% for i in range(100000) %}{% set ns.l = ns.l + ['x' * 4000000] %}{% endfor %}",
    "many small texts": "{% set ns = namespace(l='') %}{% for i in range(2000) %}"
    "{% set ns.l = namespace(a=ns.l, b='x' * 4000000) %}{% endfor %}",
    "blocks": "{% set ns = namespace(l='') %}{% for i in range(2000) %}{% set x %}{{ 'a' * 1000000 }}{% endset %}"
    "{% set ns.l = namespace(a=ns.l, b=x) %}{% endfor %}",
    "dates": "{{ strftime_now('%9999999d' * 100000)|length }}",
}
CHILD = """
import json, sys, time
from staticllm.pipelines.conversation import sandbox as bounds
from staticllm.pipelines.conversation.chat_template import render
name, template = json.loads(sys.stdin.readline())
if sys.platform == "linux":
    import resource
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (256 << 20),) * 2)
bounds.MAX_SECONDS = 1.5
start = time.monotonic()
try:
    said = render(template, [], {})
except Exception as error:
    said = f"{type(error).__name__}: {error}"
print(json.dumps([said[:300], time.monotonic() - start]))
"""


@pytest.mark.parametrize(
    "name", [name if place < 3 else pytest.param(name, marks=pytest.mark.slow) for place, name in enumerate(MEMORY)]
)
def test_a_single_operation_makes_no_text_beyond_the_bounds(name):
    """The operation runs in a child process, because it might fill the memory."""
    asked = json.dumps([name, MEMORY[name]])
    child = subprocess.run(
        [sys.executable, "-c", CHILD], input=asked, capture_output=True, text=True, timeout=20, check=False
    )
    assert child.returncode == 0, child.stderr[-500:]
    said, seconds = json.loads(child.stdout)
    assert said.startswith("PromptError"), said
    assert "runs for more than" not in said  # bounds of memory must not depend on the machine's speed
    assert seconds < 3


@pytest.mark.parametrize(
    "operation",
    [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10 ** 9 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_exceeds_a_bound_beside_tools_only_serves_plain_chat(operation):
    texts = "{% for message in messages %}{{ message.content }}{% endfor %}"
    template = f"{{% if tools %}}{operation}{{{{ tools|tojson }}}}{{% endif %}}{texts}"
    assert rendered(template, [{"role": "user", "content": "Hi"}]) == "Hi"
    start = time.monotonic()
    assert rendered(template, [{"role": "user", "content": "Hi"}]) == "Hi"
    assert time.monotonic() - start < 0.2, "what the template shows is remembered"
    tool = {"type": "function", "function": {"name": "weather"}}
    assert "weather" in rendered(template, [{"role": "user", "content": "Hi"}], tools=[tool])


@pytest.mark.parametrize(
    "template",
    [
        "{{ dict.update(messages[0], role='x') }}",
        "{{ dict.update(messages[0].parts[0], role='x') }}",
        "{% for t in tools or [] %}{{ dict.update(t.function, name='x') }}{% endfor %}{{ dict.clear(mode) }}",
        "{{ cycler.reset(raise_exception) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ dict(messages[0], role='x') }}",
    ],
)
def test_a_template_cannot_change_the_callers_objects(template):
    messages = [{"role": "user", "content": "Hi", "parts": [{"role": "a"}]}]
    tools, extra = [{"function": {"name": "f"}}], {"mode": {"a": [1]}}
    before = copy.deepcopy([messages, tools, extra])
    try:
        rendered(template, messages, tools=tools, extra_context=extra)
    except PromptError as error:
        assert "unsafe" in str(error) or "no attribute" in str(error)
    assert [messages, tools, extra] == before


def test_a_conversation_may_hold_only_plain_values():
    endless: list = []
    endless.append(endless)
    for value, said in ((Path(), "holds a"), (endless, "deeper than 64"), (lambda: 1, "holds a function")):
        with pytest.raises(PromptError, match=said):
            rendered("", extra_context={"value": value})


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ dict(messages[0], role='x').role }}{{ dict(a=1) }}{{ namespace(a=2).a }}", "x{'a': 1}2"),
        ("{{ [1, 2, 3]|sum }}{{ [{'a': 1}, {'a': 2}]|sum('a') }}{{ [[1], [2]]|sum(start=[]) }}", "63[1, 2]"),
        (
            "{{ 'a-b c'|replace(old='a', new='x', count=1)|title }}{{ 'a\nb'|indent(width='> ', first=true) }}",
            "X-B C> a\n> b",
        ),
        ("{% set g = [0, 1]|select %}{{ 'yes' if g else 'no' }}{{ g|list }}{{ g|list }}", "yes[1][]"),
        (
            "{{ [3, 1]|map('string')|join(',') }}{{ 'abc'|join('-') }}{{ ['a', 'b']|reverse|list }}",
            "3,1a-b-c['b', 'a']",
        ),
        ("{% for k, v in {'a': [1, {'b': (2,)}]}.items() %}{{ k }}{{ v }}{% endfor %}", "a[1, {'b': (2,)}]"),
        ("{% for g in [{'k': 1}, {'k': 2}]|groupby('k') %}{{ g.grouper }}{{ g.list|length }}{% endfor %}", "1121"),
        ("{{ 1 < 2 <= 2 != 3 }}{{ 'a' in 'ab' }}{{ (1, [2]) == (1, [2]) }}{{ {(1, 2): 3}[(1, 2)] }}", "TrueTrueTrue3"),
        (
            "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{% set j = joiner('|') %}{{ j() }}{{ j() }}",
            "ab|",
        ),
        ("{% filter upper %}a{{ 'b' }}{% endfilter %}{% set x %}c{{ 1 }}{% endset %}{{ x }}{{ '<'|e }}", "ABc1&lt;"),
        (
            "{% macro f() %}{{ caller(2) }}{{ varargs }}{{ kwargs }}{% endmacro %}{% call(x) f(1, a=2) %}{{ x }}{% endcall %}",
            "2(1,){'a': 2}",
        ),
        (
            "{% for a in [[1], [2]] recursive %}{{ a if a is number else loop(a) }}{% endfor %}{{ 'abcd'[1:3] ~ [1, 2][::-1] }}",
            "12bc[2, 1]",
        ),
    ],
)
def test_bounds_do_not_change_prompts(template, text):
    assert rendered(template) == text


def test_a_template_that_is_too_long_is_refused():
    with pytest.raises(PromptError, match="at most 65536"):
        rendered("a" * (MAX_TEMPLATE_CHARS + 1))


def test_the_pipeline_works_after_a_bad_template():
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
