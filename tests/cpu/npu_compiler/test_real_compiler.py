"""Tests Intel's NPU compiler itself, where there is one: beside OpenVINO's plugins, or set up under Wine."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
from support.command_line import in_here
from support.encoders.encoder_directories import a_directory
from support.npu_compiler.models import a_layer, a_refused_model, a_weighted_model

from staticllm.compiler_passes.artifacts.blob_set import read_manifest
from staticllm.compiler_passes.compiling.npu_platform import PLATFORMS
from staticllm.compiler_passes.npu_compiler.find import find_compiler
from staticllm.core import EncoderVariant
from staticllm.errors import DeviceError
from staticllm.pipelines.embedding.encoder_kind import BLOCK_ROWS

QUANTIZED = {"NPU_COMPILER_DYNAMIC_QUANTIZATION": "YES"}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compiler():
    try:
        found = find_compiler()
    except DeviceError as error:
        pytest.skip(str(error))
    with found:
        yield found


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_program_is_the_same_each_time_with_and_without_a_schedule(compiler, platform):
    model = a_layer()
    first = compiler.compile(model, platform)
    again = compiler.compile(model, platform, with_schedule=False)
    assert first.blob == again.blob
    assert first.blob
    assert first.requirements == again.requirements
    assert f"npu={platform};t={PLATFORMS[platform].default_tiles};" in first.requirements
    schedule = first.schedule
    assert 0 < schedule.repriced == schedule.total < 10_000, "f16 weights have the right price"
    assert max(schedule.engines.values()) <= schedule.total
    assert all(schedule.engines[engine] <= schedule.sums[engine] + 0.01 for engine in ("DMA", "DPU", "SHAVE"))
    assert {"MatMul", "Softmax"} & {layer.kind for layer in schedule.layers}
    assert schedule.num_dma_tasks > 0
    assert json.loads(first.trace)["taskStatistics"]["total duration"] == schedule.total


@pytest.mark.parametrize("platform", PLATFORMS)
def test_4_bit_reads_are_repriced_where_the_model_charges_16_bit(compiler, platform):
    """Its price of 8-bit weights is right on all platforms, so 4-bit weights must cost less than those after the repricing."""
    found = {
        kind: compiler.compile(a_layer(1, 2048, kind), platform, QUANTIZED).schedule for kind in ("f16", "i8", "i4")
    }
    assert found["f16"].repriced == found["f16"].total
    assert found["i8"].repriced == found["i8"].total
    assert found["i4"].repriced < found["i8"].total < found["f16"].total
    if PLATFORMS[platform].prices_4_bit_as_16:
        assert found["i4"].total > found["i8"].total
        assert found["i4"].repriced < found["i4"].total / 2
    else:
        assert found["i4"].repriced == found["i4"].total


def test_tiles_and_parameters_reach_the_compiler(compiler):
    one, six = (compiler.compile(a_layer(512, 1024), "4000", {"NPU_TILES": tiles}).schedule for tiles in ("1", "6"))
    assert six.total < one.total
    with pytest.raises(DeviceError, match="COMPILATION_MODE_PARAMS"):
        compiler.compile(a_layer(), "4000", {"NPU_COMPILATION_MODE_PARAMS": "no-such-parameter=1"})
    with pytest.raises(DeviceError, match="NPU_TILLES"):
        compiler.compile(a_layer(), "4000", {"NPU_TILLES": "1"})


def test_weights_are_in_the_blob(compiler):
    models = [a_weighted_model(seed) for seed in (0, 1)]
    first, again, other = (compiler.compile(model, "4000").blob for model in (models[0], models[0], models[1]))
    assert first == again != other
    assert len(first) > 128 * 256 * 2


def test_a_refused_model_is_one_line_and_the_next_one_compiles(compiler):
    with pytest.raises(
        DeviceError, match=r"refused the block for platform 4000 \(Lunar Lake\), in its pass \w+: Can't"
    ) as caught:
        compiler.compile(a_refused_model(), "4000", QUANTIZED, name="the block")
    assert "\n" not in str(caught.value)
    assert compiler.compile(a_layer(), "4000").blob


@pytest.mark.skipif(sys.platform == "win32", reason="it has no signals")
def test_a_late_or_killed_compiler_leaves_nothing_and_starts_again(compiler, monkeypatch, tmp_path):
    compiler.close()
    folder = tmp_path / "ü scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    model = a_layer(1024, 2048)
    with pytest.raises(DeviceError, match=r"was not compiled in 0.05 s, the limit"):
        compiler.compile(model, "4000", seconds=0.05)
    assert not list(Path(folder).iterdir())
    assert compiler.compile(a_layer(), "4000").blob
    (child,) = [each for each in psutil.Process().children() if each.pid == compiler.session.child.pid]
    threading.Timer(0.05, os.kill, (child.pid, signal.SIGKILL)).start()
    with pytest.raises(DeviceError, match=r"the NPU compiler crashed on .*, by signal 9"):
        compiler.compile(model, "4000")
    assert not list(Path(folder).iterdir())
    assert compiler.compile(a_layer(), "4000").blob
    compiler.close()
    assert not list(Path(folder).iterdir())


def test_the_process_ends_with_its_stdin_also_while_it_compiles(compiler):
    """So it ends with its parent, however that ended."""
    compiler.compile(a_layer(), "4000")
    session = compiler.session
    process = psutil.Process(session.child.pid)
    session.save(a_layer(1024, 2048), "a job")
    session.child.tell("model.xml\tprogram.blob\tNPU_COMPILER_TYPE=PLUGIN\tNPU_PLATFORM=4000")
    session.child.process.stdin.close()
    process.wait(10)
    assert compiler.compile(a_layer(), "4000").blob


def test_an_encoder_is_compiled_for_an_npu_elsewhere(compiler, tmp_path):
    """All sizes have one sequence of at most 256 rows; parts are compiled once, and the weights are f16 in one bank."""
    del compiler
    directory = a_directory(tmp_path)
    found = in_here("compile", directory, "--device", "NPU", "--platform", "4000", "--export-blob", tmp_path / "set")
    assert found.returncode == 0, found.stderr
    manifest = read_manifest(tmp_path / "set")
    assert manifest.kind == "encoder"
    assert manifest.programs == "blocks"
    assert all(variant.batch == 1 and variant.rows <= BLOCK_ROWS for variant in manifest.files_of(EncoderVariant))
    assert manifest.num_bytes > 0
