"""Tests predictions of batches: the paper's line, any function of lengths, and texts packed into rows of fixed shapes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staticllm.errors import ConfigError, PromptError
from staticllm.pipelines.embedding.queue.device_queue import DOCUMENT, DeviceQueue, Query
from staticllm.pipelines.embedding.queue.loads import Line, ShapeCosts

MINILM = {(1, 32): 2.1, (1, 64): 2.8, (1, 128): 4.7, (4, 128): 13.1, (8, 128): 23.4, (1, 256): 8.9, (1, 512): 20.2}
"""ms per call, as measured for a small encoder."""


def filled(costs, lengths):
    load = costs.new_load()
    for length in lengths:
        load.add(length)
    return load


def test_a_line_counts_queries_or_their_lengths():
    assert filled(Line(0.01, 0.1), [10, 500, 75]).seconds == pytest.approx(0.13)
    assert filled(Line(0.01, 0.1, 1.0), [75, 150]).seconds == pytest.approx(0.13)
    assert Line(0.01, 0.1, 2.0).seconds(2, 150) == pytest.approx(0.18)
    assert Line(0.01, 0.1).new_load().seconds == 0.0


@given(st.lists(st.integers(1, 512), max_size=60), st.sampled_from(["line", "shapes"]))
def test_a_prediction_is_what_adding_gives_and_never_falls(lengths, kind):
    load = {
        "line": Line(0.01, 0.1, 1.15).new_load,
        "shapes": ShapeCosts(MINILM).new_load,
    }[kind]()
    last = load.seconds
    assert last == 0
    for length in lengths:
        predicted = load.seconds_with(length)
        load.add(length)
        assert load.seconds == pytest.approx(predicted)
        assert predicted >= last - 1e-9
        last = predicted


@given(st.lists(st.integers(1, 512), min_size=1, max_size=40))
def test_packed_rows_hold_every_text_once_and_never_too_many(lengths):
    costs = ShapeCosts(MINILM)
    load = filled(costs, lengths)
    rows = {row_len: len(free) for row_len, free in load.free.items()}
    assert all(0 <= free < row_len for row_len, frees in load.free.items() for free in frees)
    used = sum(row_len * rows[row_len] - sum(load.free[row_len]) for row_len in rows)
    assert used == sum(lengths)
    assert rows[128] <= 2 * sum(length for length in lengths if length <= 128) / 128 + 1, "best fit fills half at least"


@given(st.dictionaries(st.integers(1, 9), st.floats(0.1, 10), min_size=1, max_size=4), st.integers(0, 12))
def test_rows_run_in_the_cheapest_sequence_of_calls(calls, num_rows):
    costs = ShapeCosts({(batch, 128): seconds for batch, seconds in calls.items()})
    ways = itertools.chain.from_iterable(
        itertools.combinations_with_replacement(calls, count) for count in range(num_rows + 1)
    )
    best = min(sum(calls[batch] for batch in way) for way in ways if sum(way) >= num_rows) if num_rows < 7 else None
    if best is not None:
        assert costs.seconds(128, num_rows) == pytest.approx(best)
    assert costs.seconds(128, num_rows + 1) >= costs.seconds(128, num_rows)


def test_shapes_of_one_text_and_of_many():
    costs = ShapeCosts(MINILM)
    assert filled(costs, [20]).seconds == 2.1, "one short text runs at the smallest shape"
    assert filled(costs, [20, 30]).seconds == 2.8, "two share a row"
    assert filled(costs, [100, 100]).seconds == pytest.approx(9.4)
    assert filled(costs, [100] * 8).seconds == 23.4
    assert filled(costs, [100, 60, 28, 68]).seconds == pytest.approx(9.4), (
        "28 fills the first row, so 68 fits the second"
    )
    assert filled(costs, [100, 200, 400]).seconds == pytest.approx(4.7 + 8.9 + 20.2)


def test_impossible_shapes_and_texts_are_refused():
    with pytest.raises(ConfigError, match=r"costs of no shape"):
        ShapeCosts({})
    with pytest.raises(ConfigError, match=r"shape \[1, 0\] costs 1 s: sizes and seconds must be more than 0"):
        ShapeCosts({(1, 0): 1.0})
    with pytest.raises(ConfigError, match="costs nan s"):
        ShapeCosts({(1, 8): float("nan")})
    with pytest.raises(PromptError, match="a text of 513 tokens, the longest row holds 512: truncate it"):
        ShapeCosts(MINILM).new_load().add(513)


@pytest.mark.parametrize("row_len", [1, 16, 63])
def test_a_queue_before_programs_of_few_tokens_predicts_bulk_work(row_len):
    queue = DeviceQueue("A", ShapeCosts({(1, row_len): 0.001}).new_load)
    length = next(length for length in (64, 32, 16, 8, 4, 2, 1) if length <= row_len)
    rows = 32 / (row_len // length)
    assert queue.bulk_seconds(length) == pytest.approx(0.001 * rows / 32)


def calls_before_a_document(queue, most=99):
    """Push a document behind queries that always wait; return the calls until it has its place, or ``most``."""
    queue.push(Query(0, 0.0, 64, DOCUMENT), None)
    for number in range(1, most):
        queue.push(Query(number, 0.0, 64), 1e9)
        queue.begin(0.0, 0.0)
        queue.finish()
        if not queue.bulk:
            return number
    return most


def test_a_queue_that_is_cleared_owes_its_bulk_work_no_time():
    queues = [DeviceQueue("A", Line(0.01, 0.1).new_load) for _ in range(2)]
    expected = calls_before_a_document(queues[0])
    assert 1 < expected < 99
    calls_before_a_document(queues[1], most=expected)
    assert len(queues[1].bulk) == 1
    queues[1].clear()
    assert calls_before_a_document(queues[1]) == expected
