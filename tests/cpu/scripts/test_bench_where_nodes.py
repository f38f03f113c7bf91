"""Tests the profile of calls by kinds of nodes, and the descriptions of settings."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
from bench_where_nodes import (
    NodeTime,
    decode_step,
    kind_of,
    profile_calls,
    prompt_of,
    shares_of,
    times_after_first,
)

from staticllm.config import StaticLLMConfig
from staticllm.core import Variant

SMALL = {"max_prompt_len": 128, "min_response_len": 64, "max_num_seqs": 2}


@pytest.mark.parametrize(
    ("node_type", "fused", "kind"),
    [
        ("FullyConnectedCompressed", (), "matrix products"),
        ("MatMul", (), "attention"),
        ("Subgraph", ("MatMul", "Add", "Softmax"), "attention"),
        ("Subgraph", ("Swish", "Multiply"), "elementwise"),
        ("PowerStatic", (), "elementwise"),
        ("VariadicSplit", (), "splits and joins"),
        ("Tile", (), "masks and repeats"),
        ("Unheard", (), "other"),
    ],
)
def test_the_kind_of_a_node(node_type, fused, kind):
    assert kind_of(node_type, fused) == kind


def test_shares_are_those_of_all_nodes():
    times = [
        NodeTime("a", "MatMul", 1.0),
        NodeTime("b", "Softmax", 2.0),
        NodeTime("c", "Tile", 9.0),
        NodeTime("d", "Tile", 0),
    ]
    found = shares_of(times, {"a": "attention", "b": "attention", "c": "masks and repeats", "d": "masks and repeats"})
    assert [(each.kind, each.ms, each.count, each.share) for each in found] == [
        ("masks and repeats", 9.0, 1, 0.75),
        ("attention", 3.0, 2, 0.25),
    ]
    assert found[1].types == ("MatMul", "Softmax")


def test_a_call_is_chosen_by_its_tokens():
    variants = [Variant(1, 256), Variant(1, 512), Variant(4, 256, 4), Variant(16, 0), Variant(64, 0), Variant(64, 256)]
    assert decode_step(variants) == Variant(1, 512)
    assert [prompt_of(count)(variants) for count in (3, 17, 1000)] == [Variant(16, 0), Variant(64, 0), Variant(64, 0)]
    recurrent = [Variant(1, 128), Variant(2, 128), Variant(8, 128)]
    assert decode_step(recurrent[:1]) == prompt_of(5)(recurrent[:1]) == Variant(1, 128)
    assert prompt_of(5)(recurrent) == Variant(8, 128)


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_the_profile_of_a_call_is_complete(name, model_path):
    config = StaticLLMConfig(**SMALL)
    profiles = list(profile_calls(model_path(name), "CPU", config, [decode_step, prompt_of(100), prompt_of(100)]))
    assert len(profiles) == 2
    for profile in profiles:
        assert profile.ms > 0
        assert sum(each.ms for each in profile.nodes) == pytest.approx(profile.ms)
        assert sum(each.share for each in profile.nodes) == pytest.approx(1)
        assert {"matrix products", "attention"} <= {each.kind for each in profile.nodes}


class CountingRequest:
    """A request whose node takes 90 ms in its first run and 6 ms in each other one; the plugin's counters are means."""

    def __init__(self):
        self.runs = 0

    def start_async(self):
        self.runs += 1

    def wait(self):
        pass

    @property
    def profiling_info(self):
        mean = (90 + 6 * (self.runs - 1)) / self.runs
        return [SimpleNamespace(node_name="a", node_type="MatMul", real_time=timedelta(milliseconds=mean))]


def test_the_time_of_a_node_is_that_of_its_later_runs():
    (node,) = times_after_first(CountingRequest())
    assert node.ms == pytest.approx(6, abs=0.01)


def test_the_calls_of_a_profile_do_not_count_for_each_other(model_path):
    """A decode step after a prompt of many rows takes as long as one before it."""
    config = StaticLLMConfig(**{**SMALL, "max_prompt_len": 512}, device_properties={"INFERENCE_PRECISION_HINT": "f32"})
    prompt, step = profile_calls(model_path("demo"), "CPU", config, [prompt_of(512), decode_step])
    assert step.ms < prompt.ms / 3
