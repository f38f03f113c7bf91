"""Compares the path from a prompt to its text, call by call on the fake device, with docs/structure.md."""

from __future__ import annotations

import re
import sys
import threading

import numpy as np
import pytest

from staticllm.testing import fake_answer, fake_pipeline

MAX_HOPS = 8
MAX_MODULES = 41
ROOMS = re.compile(r"[\\/](pipelines[\\/](?:\w+[\\/])*\w+)\.py$")


@pytest.fixture
def pipe():
    with fake_pipeline(scheduler="fcfs", MAX_PROMPT_LEN=32, MIN_RESPONSE_LEN=32) as pipe:
        yield pipe


class Follower:
    """Records each function of the rooms on its first call: its name, module, thread, and the calling module."""

    def __init__(self):
        self.calls = {}

    def __call__(self, frame, event, _):
        place = ROOMS.search(frame.f_code.co_filename)
        if event == "call" and place:
            caller = ROOMS.search(frame.f_back.f_code.co_filename) if frame.f_back else None
            name = getattr(frame.f_code, "co_qualname", None) or qualified(frame)
            module = place[1].replace("\\", "/")
            self.calls.setdefault(
                name, (module, threading.current_thread().name, caller and caller[1].replace("\\", "/"))
            )

    def __enter__(self):
        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)
        threading.setprofile(None)


def qualified(frame):
    """Return the names of class and function; code objects have them only since Python 3.11."""
    name, owner = frame.f_code.co_name, frame.f_locals.get("self")
    if owner is None:
        return name
    kind = next((kind for kind in type(owner).__mro__ if name in vars(kind)), type(owner))
    return f"{kind.__name__}.{name}"


def test_a_prompt_becomes_text_as_structure_md_says(pipe, root):
    page = (root / "docs" / "structure.md").read_text(encoding="utf-8")
    journey = page.split("## From a prompt to its text\n")[1].split("\n## ")[0]
    told = re.findall(r"^\d+\. `(\w+\.\w+)` \(`([\w/]+)\.py`, (caller|engine|reader)'s thread\)", journey, re.MULTILINE)
    assert 0 < len(told) - 1 <= MAX_HOPS, "too many hops from a prompt to its text"
    with Follower() as follower:
        answer = pipe.generate(np.array([5, 6, 7]), max_new_tokens=4, ignore_eos=True)
    assert answer.tokens[0] == fake_answer([5, 6, 7], 4, vocab_size=pipe.vocab_size)[3:]
    order = list(follower.calls)
    assert [name for name in order if name in {function for function, _, _ in told}] == [f for f, _, _ in told]
    for function, module, thread in told:
        where, by, caller = follower.calls[function]
        assert where == f"pipelines/{module}", function
        assert (by == "staticllm-engine") == (thread == "engine"), f"{function} runs on {by}"
        so_far = journey.partition(f"`{function}` (`{module}.py`")
        known = {f"pipelines/{name}" for name in re.findall(r"`([\w/]+)\.py`", "".join(so_far))}
        assert caller is None or caller in known | {"pipelines/text/handle"}, f"{function} is called from {caller}"


def test_generate_enters_few_modules(pipe):
    """Three of them are parts of the core: what runs next, its call, and what follows; four say whose thread makes the steps, and
    one is the reader of an answer. Without policies, the cost probe of an
    engine that rests, and what caller and engine share a device by."""
    with Follower() as follower:
        pipe.generate(np.array([5, 6, 7]), max_new_tokens=4, ignore_eos=True)
    entered = {module for module, _, _ in follower.calls.values() if not module.endswith(("costs/probe", "device_use"))}
    assert len(entered) <= MAX_MODULES, sorted(entered)
