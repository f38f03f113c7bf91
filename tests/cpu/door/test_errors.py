"""Tests that every error keeps class, text and fields on its way to another process, and that nothing else gets through."""

import ast
import json
import math
import pickle
from pathlib import Path
from typing import get_type_hints

import pytest

from staticllm.cli.server_client import ServerError
from staticllm.errors import (
    MAX_SENT,
    BusyError,
    ConfigError,
    DeviceError,
    GenerationConfigError,
    PromptTooLongError,
    StaticLLMError,
    UnsupportedModelError,
    from_wire,
    to_wire,
)
from staticllm.pipelines.decisions.questions import QuestionError
from staticllm.pipelines.decisions.tree import DecisionCancelledError  # noqa: F401
from staticllm.pipelines.embedding.pool.instances import WorkerLostError  # noqa: F401  so that it is in the tree
from staticllm.pipelines.generation.grammar_mask import GrammarLimitError  # noqa: F401
from staticllm.server.sidecar import PortInUseError  # noqa: F401

ROOT, FOLDERS = Path(__file__).parents[3], ("staticllm", "compiler_passes", "kvcache", "pipelines")
WITH_FIELDS = [
    UnsupportedModelError("lift_state", "state 'a' is read and never assigned"),
    PromptTooLongError(300, 256),
    PromptTooLongError(1 << 30, 256, is_chat=True),
    BusyError("too many texts wait", 2.5),
    BusyError("too many texts wait", 3),
    BusyError("no device takes such a text", math.inf),
    BusyError("no prediction"),
    ServerError("the server refused it", 429),
    QuestionError("questions[1] has no value", ("questions", 1)),
]


def tree(kind=StaticLLMError):
    """Return a class of errors and all that derive from it."""
    return [kind, *(each for child in kind.__subclasses__() for each in tree(child))]


def ours():
    return [kind for kind in tree() if kind.__module__.startswith("staticllm.")]


def sent(error, origin=""):
    """Return an error as another process receives it."""
    return from_wire(json.loads(json.dumps(to_wire(error), allow_nan=False)), origin)


def test_no_module_has_an_error_that_this_file_does_not_import():
    known, found = {kind.__name__ for kind in ours()}, set()
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and known & {ast.unparse(base) for base in node.bases}:
                found.add(node.name)
    assert found == known - {"StaticLLMError"}


@pytest.mark.parametrize("kind", ours())
def test_every_class_of_the_tree_is_sent_as_itself(kind):
    examples = [error for error in WITH_FIELDS if type(error) is kind] or [kind("a text of one line")]
    for error in examples:
        back = sent(error)
        assert type(back) is kind
        assert str(back) == str(error)
        assert vars(back) == vars(error)
        again = pickle.loads(pickle.dumps(back))
        assert (type(again), str(again), vars(again)) == (kind, str(error), vars(error))


@pytest.mark.parametrize("error", WITH_FIELDS, ids=repr)
def test_every_field_is_declared(error):
    assert set(vars(error)) == set(get_type_hints(type(error)))


def test_an_origin_stands_before_the_text_and_fields_stay():
    back = sent(PromptTooLongError(300, 256), "CPU#1: ")
    assert str(back).startswith("CPU#1: the prompt has 300 tokens")
    assert (back.num_tokens, back.limit) == (300, 256)


def test_a_class_of_a_newer_peer_is_the_nearest_base_that_is_known():
    newer = {
        "type": "GrammarError",
        "bases": ["GenerationConfigError", "ConfigError", "StaticLLMError", "RuntimeError"],
    }
    back = from_wire({**newer, "text": "line 3", "fields": {"line": 3}})
    assert type(back) is GenerationConfigError
    assert (str(back), vars(back)) == ("line 3", {})


def test_a_class_of_a_newer_peer_keeps_the_fields_of_its_base():
    newer = {"type": "QueueFullError", "bases": ["BusyError", "StaticLLMError"], "text": "full"}
    back = from_wire({**newer, "fields": {"retry_after": 1.5, "queue": "NPU"}})
    assert type(back) is BusyError
    assert vars(back) == {"retry_after": 1.5}


def test_a_class_whose_fields_a_peer_does_not_send_is_its_nearest_base():
    back = from_wire(
        {"type": "UnsupportedModelError", "bases": ["ModelError"], "text": "a: b", "fields": {"stage": "a"}}
    )
    assert type(back).__name__ == "ModelError"


def test_an_error_of_a_user_is_our_nearest_base_also_if_it_has_the_name_of_one_of_ours():
    own = type("DeviceError", (ConfigError,), {})
    assert type(sent(own("mine"))) is DeviceError  # the name is all that a peer can know
    other = type("MyError", (PromptTooLongError,), {"__init__": ValueError.__init__})
    back = sent(other("mine"))
    assert (type(back).__name__, str(back)) == ("PromptError", "mine")


@pytest.mark.parametrize("error", [ValueError("of a library"), KeyError("a"), AssertionError(), MemoryError("no room")])
def test_other_errors_are_of_the_base_class(error):
    back = sent(error)
    assert type(back) is StaticLLMError
    assert str(back) == str(error)


def test_texts_are_cut_to_what_the_other_side_takes():
    back = sent(UnsupportedModelError("a" * 10**6, "b" * 10**6))
    assert (len(str(back)), len(back.stage), len(back.reason)) == (MAX_SENT,) * 3


GOOD = to_wire(PromptTooLongError(300, 256))
BUSY = to_wire(BusyError("full", 1.0))


@pytest.mark.parametrize(
    "values",
    [
        None, 5, "ConfigError", [], {}, {**GOOD, "type": 5}, {**GOOD, "type": None}, {**GOOD, "type": "a" * (MAX_SENT + 1)},
        {**GOOD, "bases": "PromptError"}, {**GOOD, "bases": [5]}, {**GOOD, "bases": ["a"] * 10_000},
        {**GOOD, "text": 5}, {**GOOD, "text": "a" * 10**7}, {**GOOD, "text": ["a\n"] * 1000}, {**GOOD, "fields": None},
        {**GOOD, "fields": ["num_tokens"]}, {**GOOD, "fields": {**GOOD["fields"], "num_tokens": "300"}},
        {**GOOD, "fields": {**GOOD["fields"], "num_tokens": 1 << 10_000}},
        {**GOOD, "fields": {**GOOD["fields"], "limit": True}}, {**GOOD, "fields": {**GOOD["fields"], "_is_chat": 1}},
        {**BUSY, "fields": {"retry_after": "soon"}}, {**BUSY, "fields": {"retry_after": 1 << 2000}},
        {**BUSY, "fields": {"retry_after": [1.0]}}, {**BUSY, "fields": {"retry_after": True}},
    ],
)  # fmt: skip
def test_what_is_no_error_is_refused_in_one_line(values):
    with pytest.raises(ValueError, match="must be") as refusal:
        from_wire(values)
    assert type(refusal.value) is ValueError
    assert len(str(refusal.value).splitlines()) == 1
    assert len(str(refusal.value)) < 500
