"""Tests the picture of a trace, which needs matplotlib."""

import sys

import pytest

from staticllm.core import Variant
from staticllm.errors import ConfigError
from staticllm.pipelines.profiling.records import StepRecord
from staticllm.pipelines.profiling.timeline import draw
from staticllm.pipelines.profiling.trace import Trace


def steps_of(count, rows=128):
    return [
        StepRecord(0.1 * k, 0.08, Variant(rows, 64, 6), (1, 2), ((k, 9),), 11 * k, k % 3, k % 2, 2, (3,) * (k % 2))
        for k in range(1, count + 1)
    ]


@pytest.mark.parametrize(
    "count", [pytest.param(1, marks=pytest.mark.slow), 30, pytest.param(200, marks=pytest.mark.slow)]
)
def test_a_picture_is_drawn(tmp_path, count):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    draw(Trace(steps_of(count)), tmp_path / "timeline.png")
    image = imread(tmp_path / "timeline.png")[..., :3]
    assert min(image.shape[:2]) > 500
    for colour in ((0x2F, 0x6F, 0x9F), (0xD1, 0x60, 0x3D), (0xDC, 0xDC, 0xDC)):
        near = abs(image * 255 - colour).max(axis=-1) < 6
        assert near.sum() > 200, f"decode, prefill or padding is not visible: {colour}"


@pytest.mark.parametrize("name", ["timeline.nonsense", "no/such/folder.png"])
def test_a_picture_that_cannot_be_written_is_an_error(tmp_path, name):
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match="choose"):
        draw(Trace(steps_of(3)), tmp_path / name)


def test_an_empty_trace_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no device calls"):
        draw(Trace(), tmp_path / "timeline.png")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        draw(Trace(steps_of(3)), tmp_path / "timeline.png")
