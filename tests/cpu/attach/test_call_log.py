"""Tests the calls that are repeated after a crash, against a model that keeps every token it was given."""

from __future__ import annotations

import importlib
import sys
import types
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import staticllm

NAMES = [frozenset(["input_ids"]), frozenset(["attention_mask"]), frozenset(["position_ids"]), frozenset(["beam_idx"])]


@pytest.fixture(scope="module")
def call_log():
    """The module, loaded as in a program of others; ``staticllm.attach`` would attach this process."""
    parent = types.ModuleType("_staticllm_client_of_tests")
    package = types.ModuleType("_staticllm_client_of_tests.attach")
    parent.__path__ = [staticllm.__path__[0]]
    package.__path__ = [f"{staticllm.__path__[0]}/attach"]
    sys.modules[parent.__name__], sys.modules[package.__name__] = parent, package
    yield importlib.import_module(f"{package.__name__}.call_log")
    for name in [name for name in sys.modules if name.startswith(parent.__name__)]:
        del sys.modules[name]


class Rows:
    """Keeps the tokens, mask and positions of each row, as the states of a decoder do."""

    def __init__(self):
        self.rows, self.num_calls, self.longest = [], 0, 0

    def run(self, inputs):
        ids, mask, positions, beams = (inputs[index] for index in range(4))
        old = [self.rows[beam] for beam in beams] if self.rows else [[] for _ in ids]
        self.rows = [[*row, *zip(ids[i].tolist(), positions[i].tolist(), strict=True)] for i, row in enumerate(old)]
        assert mask.shape == (len(self.rows), len(self.rows[0])), "the mask has a column per token"
        self.mask, self.num_calls, self.longest = mask.tolist(), self.num_calls + 1, max(self.longest, ids.shape[1])


@st.composite
def conversations(draw):
    rows, width, calls = draw(st.integers(1, 3)), 0, []
    for number in range(draw(st.integers(1, 8))):
        length = draw(st.sampled_from([1, 1, 2, 40]))
        count = draw(st.sampled_from([rows, rows, rows, 2])) if number else rows
        beams = draw(st.lists(st.integers(0, rows - 1), min_size=count, max_size=count))
        if not number or (count == rows and draw(st.booleans())):
            beams = list(range(count))
        rows, width = count, width + length
        mask = np.array(draw(st.lists(st.sampled_from([1, 1, 1, 0]), min_size=width, max_size=width)), np.int64)
        ids = np.arange(rows * length).reshape(rows, length) + 100 * number
        old = calls[-1][1][beams] if calls else np.zeros((rows, 0), np.int64)
        grown = np.concatenate([old, np.ones((rows, length), np.int64)], 1)
        whole = grown if draw(st.booleans()) else np.tile(mask, (rows, 1))
        calls.append({0: ids, 1: whole, 2: ids + 7, 3: np.array(beams)})
    return calls


@settings(max_examples=150, deadline=None)
@given(calls=conversations())
def test_a_repeated_conversation_leads_to_the_same_states(call_log, calls):
    log, original, repeated = call_log.CallLog(NAMES), Rows(), Rows()
    for call in calls:
        original.run(call)
        log.add(call)
    log.repeat(repeated)
    assert (repeated.rows, repeated.mask) == (original.rows, original.mask)
    assert repeated.longest <= call_log.CHUNK


def test_steps_are_joined(call_log):
    log, repeated = call_log.CallLog(NAMES), Rows()
    for number in range(64):
        log.add(
            {0: np.array([[number]]), 1: np.ones((1, number + 1), np.int64), 2: np.array([[number]]), 3: np.array([0])}
        )
    assert len(log) == 1
    log.repeat(repeated)
    assert repeated.num_calls == 64 // call_log.CHUNK


def test_states_that_were_set_written_and_set_back_are_repeated_in_their_order(call_log):
    log, values, repeated = call_log.CallLog(NAMES), np.zeros(2), mock.Mock()
    log.add_state(call_log.StateChange(0, values))
    log.add_state(call_log.StateChange(1, values, is_in_place=True))
    log.add_state(call_log.StateChange(2, None))
    log.repeat(repeated)
    assert repeated.mock_calls == [
        mock.call.set_state(0, values),
        mock.call.write_state(1, values),
        mock.call.reset_state(2),
    ]


def test_a_log_that_is_too_large_says_so(call_log, monkeypatch):
    monkeypatch.setattr(call_log, "MAX_BYTES", 1000)
    log = call_log.CallLog([frozenset(["x"])])
    for _ in range(3):
        log.add({0: np.zeros(500, np.uint8)})
    with pytest.raises(RuntimeError, match="reset_state"):
        log.repeat(Rows())
    log.clear()
    log.repeat(Rows())
