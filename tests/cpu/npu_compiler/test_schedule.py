"""Tests how the compiler's trace becomes a schedule: sums, layers, the price of 4-bit reads, and files of any content."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staticllm.compiler_passes.compiling.npu_platform import PLATFORMS, platform_of
from staticllm.compiler_passes.npu_compiler import schedule as module
from staticllm.compiler_passes.npu_compiler.refusal import Log, refused_text
from staticllm.compiler_passes.npu_compiler.schedule import heaviest, read_schedule
from staticllm.errors import ConfigError, DeviceError

STATISTICS = {
    "total duration": 181.498, "DMA duration": 160.596, "DPU duration": 2.885, "SW duration": 23.437,
    "Sum of DMA task durations": 312.435, "Sum of DPU task durations": 11.54, "Sum of SW task durations": 149.493,
}  # fmt: skip


def a_read(dur, bytes_, tid=0, source="DDR", target="CMX", strides=None, name="MatMul_6?t_MatMul/cluster_0"):
    shape = f"[{bytes_}xui8]"
    arguments = {
        "Source memory:": source, "Destination memory:": target, "Input tensor shape": shape,
        "Input tensor strides": strides or shape,
    }  # fmt: skip
    return {"name": name, "cat": "DMA", "ph": "X", "ts": 0.0, "dur": dur, "pid": 0, "tid": tid, "args": arguments}


def a_layer(name, kind, **times):
    return {
        "name": name, "cat": "Layer", "ph": "X", "ts": 0.0, "dur": 1.0, "pid": 5, "tid": 20,
        "args": {"Layer type": kind, **{key.replace("_", " "): text for key, text in times.items()}},
    }  # fmt: skip


def a_trace(*events, **statistics):
    begin = {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "DMA"}}
    return {"traceEvents": [begin, *events], "taskStatistics": {**STATISTICS, **statistics}, "displayTimeUnit": "ns"}


def schedule_of(*events, platform="4000", **statistics):
    return read_schedule(json.dumps(a_trace(*events, **statistics)).encode(), platform_of(platform))


def test_engines_are_summed_and_dma_tasks_counted():
    found = schedule_of(a_read(16.9, 544768), a_read(0.9, 0, tid=1))
    assert found.total == found.repriced == 181.498
    assert found.engines == {"DMA": 160.596, "DPU": 2.885, "SHAVE": 23.437}
    assert found.sums == {"DMA": 312.435, "DPU": 11.54, "SHAVE": 149.493}
    assert found.num_dma_tasks == 2


def test_layers_are_added_up_by_node_dearest_first():
    found = schedule_of(
        a_layer("a", "MatMul", DMA_time="266us 611ns", DPU_time="1ms"),
        a_layer("a", "MatMul", DMA_time="1us"),
        a_layer("b", "MatMul", DMA_time="2s 5us"),
        a_layer("c", "Softmax", Shave_time="149us 493ns"),
        a_layer("idle", "<Unknown>"),
    )
    rows = [(row.name, row.kind, pytest.approx((row.dma, row.dpu, row.shave))) for row in found.layers]
    assert rows == [
        ("b", "MatMul", (2_000_005.0, 0, 0)), ("a", "MatMul", (267.611, 1000.0, 0)),
        ("c", "Softmax", (0, 0, 149.493)), ("idle", "<Unknown>", (0, 0, 0)),
    ]  # fmt: skip
    (row,) = heaviest(found, 1)
    assert (row.kind, row.total) == ("MatMul", pytest.approx(2_000_005 + 267.611 + 1000))


def test_4_bit_reads_cost_their_bytes_where_the_model_charges_16_bit():
    """544,768 bytes of 4-bit weights are charged 65.06 us on 4000; as many of 8-bit weights 16.92 us (forms of one MatMul)."""
    dear = [a_read(65.06, 544768, tid) for tid in (0, 0, 1)]
    repriced = 181.498 - 2 * (65.06 - 0.85) * 0.75
    for platform, expected in (("3720", repriced), ("4000", repriced), ("5010", 181.498)):
        assert schedule_of(*dear, platform=platform).repriced == pytest.approx(expected)
    of_8_bit = (65.06 - 0.85) * 0.25 + 0.85
    assert of_8_bit == pytest.approx(16.92, abs=0.02)


@pytest.mark.parametrize(
    "read",
    [
        a_read(16.92, 544768),  # the price of 8 bits
        a_read(1.7, 18432),  # small reads are slower
        a_read(4.0, 8192),
        a_read(65.06, 544768, source="CMX"),
        a_read(65.06, 544768, target="DDR"),
        a_read(65.06, 544768, strides="[1088xui8]"),  # not dense
        {**a_read(65.06, 1), "args": {}},
    ],
)
def test_other_reads_keep_their_price(read):
    assert schedule_of(read).repriced == 181.498


def test_no_price_is_below_0():
    assert schedule_of(a_read(900.0, 544768), **{"total duration": 1.0}).repriced == 0.0


DAMAGED = [
    b"", b"{", b"[]", b"null", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"traceEvents": 1e999}',
    *(json.dumps({**a_trace(), "traceEvents": events}).encode() for events in (None, {}, [1], [None], ["X"])),
    *(
        json.dumps(a_trace({**a_read(1.0, 1), **change})).encode()
        for change in ({"dur": -1}, {"dur": "1"}, {"dur": None}, {"dur": 1e300}, {"dur": float("nan")}, {"name": 1}, {"args": []})
    ),
    *(json.dumps(a_trace(**{"total duration": value})).encode() for value in (-1, "1", None, True, float("inf"))),
    json.dumps({"traceEvents": []}).encode(),
    json.dumps({"traceEvents": [], "taskStatistics": [1]}).encode(),
    json.dumps(a_trace(**{"Sum of DMA task durations": "x"})).encode(),
    json.dumps(a_trace()).replace("181.498", "1" * 5000).encode(),
]  # fmt: skip


@pytest.mark.parametrize("data", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_trace_is_one_line(data):
    with pytest.raises(
        DeviceError, match=r"the compiler's schedule is damaged .*: compile without a schedule"
    ) as caught:
        read_schedule(data, PLATFORMS["4000"])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_trace_that_is_too_large_is_not_read(monkeypatch):
    monkeypatch.setattr(module, "MAX_TRACE", 100)
    with pytest.raises(DeviceError, match="has 101 bytes, at most 100 are read"):
        read_schedule(b" " * 101, PLATFORMS["4000"])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)
KEYS = ["Input tensor shape", "Input tensor strides", "Source memory:", "DMA time", "DPU time", "Layer type"]
EVENTS = st.fixed_dictionaries(
    {"ph": st.just("X"), "dur": st.floats(0, 1e6), "name": st.text(max_size=5)},
    optional={
        "cat": st.sampled_from(["DMA", "Layer", "DPU"]), "tid": JSON,
        "args": st.dictionaries(st.sampled_from(KEYS), JSON | st.from_regex(r"\[(\d+x)*ui8\]|\d+us \d+ns", fullmatch=True)),
    },
)  # fmt: skip


@given(st.lists(EVENTS, max_size=5), JSON)
def test_any_json_is_a_schedule_or_one_line(events, other):
    for document in (a_trace(*events), a_trace(*events, **{"DMA duration": other}), {"traceEvents": other}, other):
        try:
            found = read_schedule(json.dumps(document).encode(), PLATFORMS["4000"])
        except DeviceError as error:
            assert "\n" not in str(error)
        else:
            assert 0 <= found.repriced <= found.total
            assert all(layer.total >= 0 for layer in found.layers)


def test_platforms_are_found_by_number():
    for number, platform in PLATFORMS.items():
        assert platform_of(number) == platform_of(f"NPU{number}") == platform_of(int(number)) == platform
        assert 1 <= platform.default_tiles <= platform.tiles
    for wrong in ("", "40000", "NPU", None, 4000.0, [], "4" * 10_000):
        with pytest.raises(ConfigError, match=r"is not known: use one of 3720 \(Meteor Lake\)") as caught:
            platform_of(wrong)
        assert len(str(caught.value)) < 500


def test_a_refusal_shows_one_line_of_any_log(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"old [ERROR]\n")
    log = Log(path)
    log.begin()
    with path.open("ab") as file:
        file.write(
            b"[ERROR] 1:2 [vpux-compiler] \x1b[31mbad\xff"
            + b"x" * 1_000_000
            + b"\n[ERROR] 1:2 [c] Failed Pass P on Operation l\n"
        )
    text = refused_text("a block", "no", log)
    assert "\n" not in text
    assert "\x1b" not in text
    assert "old" not in text
    assert len(text) < 600
    assert "in its pass P" in text
