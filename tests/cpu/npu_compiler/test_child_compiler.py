"""Tests the NPU compiler's process with a fake child that refuses, dies, hangs and lies: one line of ours, nothing left."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import openvino as ov
import psutil
import pytest
from openvino import opset13 as ops
from support.npu_compiler import fake_child

from staticllm.compiler_passes.npu_compiler.child_compiler import ChildCompiler, Launch
from staticllm.errors import ConfigError, DeviceError
from staticllm.system import scratch_folder

CHILD = Path(fake_child.__file__)
LIVING = {
    "refuse", "unknown_option", "no_library", "no_blob", "empty_blob", "link_as_blob", "no_trace", "huge_trace",
    "damaged_trace",
}  # fmt: skip
"""Ways after which the child can be asked again; after the others it has ended."""


@pytest.fixture(autouse=True)
def scratch(monkeypatch, tmp_path):
    """A temporary folder of this test's own, which must be empty at its end."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert not list(folder.iterdir())


@pytest.fixture
def compiler_of():
    """A function from the ways in which a child behaves to a compiler, which is closed at the end."""
    made = []

    def compiler(*ways, **more):
        launch = Launch((sys.executable, str(CHILD), ",".join(ways)), {"MARK": "1"}, "the fake compiler", "mend it")
        made.append(ChildCompiler(launch, **more))
        return made[-1]

    yield compiler
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def model():
    value = ops.parameter([1, 4], ov.Type.f32)
    weights = ops.constant([[1.0] * 4] * 4, ov.Type.f32)
    return ov.Model([ops.matmul(value, weights, False, False)], [value], "a small model")


def wait_until(is_true):
    moment = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < moment
        time.sleep(0.01)


def processes():
    return {each.pid for each in psutil.Process().children(recursive=True)}


def test_a_program_has_its_blob_schedule_and_trace(compiler_of, model):
    compiler = compiler_of()
    program = compiler.compile(model, "4000", {"NPU_TILES": "2"})
    assert program.blob.decode().split("\t") == [
        "model.xml", "program.blob", "NPU_COMPILER_TYPE=PLUGIN", "NPU_PLATFORM=4000", "NPU_TILES=2",
        "NPU_COMPILATION_MODE_PARAMS=enable-schedule-trace=true",
    ]  # fmt: skip
    assert (program.seconds, program.requirements) == (0.25, "npu=4000;t=4")
    assert (program.schedule.total, program.schedule.num_dma_tasks) == (9.5, 1)
    assert b"a_node" in program.trace
    assert compiler.version == "openvino 2026.4.1-fake, NPU compiler 8.4"


def test_several_programs_share_one_process(compiler_of, model):
    others = processes()  # that tests before this one have left
    compiler = compiler_of("ok", "refuse", "ok")
    compiler.compile(model, "4000")
    first = processes() - others
    with pytest.raises(DeviceError):
        compiler.compile(model, "4000")
    compiler.compile(model, "4000")
    assert processes() - others == first
    compiler.close()
    wait_until(lambda: not processes() & first)
    assert compiler.compile(model, "4000").blob  # in a new one


def test_the_parameters_of_the_caller_stay_beside_that_of_the_schedule(compiler_of, model):
    given = {"NPU_COMPILATION_MODE_PARAMS": "optimization-level=3 enable-schedule-trace=false"}
    compiler = compiler_of()
    request = compiler.compile(model, "3720", given).blob.decode()
    assert request.endswith("\tNPU_COMPILATION_MODE_PARAMS=optimization-level=3 enable-schedule-trace=true")
    program = compiler.compile(model, "3720", given, with_schedule=False)
    assert program.blob.decode().endswith("=optimization-level=3 enable-schedule-trace=false")
    assert program.schedule is None is program.trace


@pytest.mark.parametrize(
    ("platform", "properties", "message"),
    [
        ("4001", {}, r"'4001' is not known: use one of 3720 \(Meteor Lake\), 4000 \(Lunar Lake\), 5010 \(Panther Lake\)"),
        ("", {}, "platform '' is not known"),
        (None, {}, "platform None is not known"),
        ("4000", {"NPU_PLATFORM": "3720"}, "NPU_PLATFORM is '3720', and must be 4000 here"),
        ("4000", {"NPU_COMPILER_TYPE": "DRIVER"}, "must be PLUGIN here"),
        ("4000", {"NPU_TILES": "2\tNPU_PLATFORM=3720"}, "must be a text of one line"),
        ("4000", {"NPU_TILES": "2\n"}, "must be a text of one line"),
        ("4000", {"NPU_TILES": 2}, "NPU_TILES is 2: must be a text"),
        ("4000", {"NPU=TILES": "2"}, "'NPU=TILES' is no property"),
        ("4000", {f"KEY_{number}": "1" for number in range(63)}, "63 properties are given, at most 62"),
        ("4000", {f"KEY_{number}": "1" * 2000 for number in range(40)}, "at most 60000 are sent"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_before_a_process_starts(compiler_of, model, platform, properties, message):
    with pytest.raises(ConfigError, match=message) as caught:
        compiler_of("start-dies").compile(model, platform, properties)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_an_impossible_limit_is_refused(compiler_of, model, seconds):
    with pytest.raises(ConfigError, match="must be more than 0"):
        compiler_of().compile(model, "4000", seconds=seconds)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("refuse", r"refused block 3 for platform 4000 \(Lunar Lake\), in its pass UnrollDMA, at the node a_node: "
         r"Got Diagnostic"),
        ("no_library", r"the fake compiler cannot be used \(Cannot load library .*a.dll\S*: 193\): mend it"),
        ("unknown_option", r"refused block 3 .*: Option 'X' is not supported; another form"),
        ("dies", r"crashed on block 3 .*, with code 134, it closed its pipe, at the node b_node: LLVM ERROR: out of reg"),
        ("dies_in_its_answer", r"crashed on block 3 .*, because it answered 'staticllm-npu \{\"ok\": tr'"),
        ("hangs", r"block 3 .* was not compiled in 1 s, the limit: raise it"),
        ("endless_noise", r"crashed on block 3 .*, because it wrote more than \d+ characters that are no answer"),
        ("endless_line", r"crashed on block 3 .*a line has more than 1048576 bytes|by signal 9"),
        ("no_json", "because it answered"),
        ("no_object", "because it answered"),
        ("no_verdict", "because it answered"),
        ("deep", "because it answered"),
        ("no_blob", r"the program of block 3 .* cannot be read \(No such file"),
        ("empty_blob", "the program of block 3 .* is empty"),
        ("link_as_blob", "is a link, not a file"),
        ("no_trace", "compile it without a schedule"),
        ("huge_trace", r"has 1099511627776 bytes, at most \d+ are read"),
        ("damaged_trace", "the compiler's schedule is damaged"),
    ],
)  # fmt: skip
@pytest.mark.skipif(sys.platform == "win32", reason="messages and links are those of POSIX")
def test_what_goes_wrong_is_one_line_and_the_compiler_can_be_used_again(compiler_of, model, way, message):
    compiler = compiler_of(way)
    before = processes()
    seconds = 1 if way == "hangs" else 60
    with pytest.raises(DeviceError, match=message) as caught:
        compiler.compile(model, "4000", name="block 3", seconds=seconds)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert len(processes() - before) == (1 if way in LIVING else 0)
    launch = compiler.launch
    compiler.launch = Launch((*launch.command[:2], ""), {}, launch.what, launch.remedy)
    assert compiler.compile(model, "4000").blob


def test_lines_that_are_no_text_are_passed_over(compiler_of, model):
    assert compiler_of("bytes_of_anything").compile(model, "4000").blob


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("start-hangs", "the fake compiler did not start in 0.5 s: mend it"),
        ("start-dies", "the fake compiler ended when it started, with code 5, .*wine: cannot find.*; mend it"),
        ("start-refuses", r"the fake compiler cannot be used \(Cannot load library\): mend it"),
    ],
)
def test_a_child_that_does_not_start_says_why(compiler_of, model, way, message):
    seconds = 0.5 if way == "start-hangs" else 60
    compiler = compiler_of(way, start_seconds=seconds)
    for call in (lambda: compiler.compile(model, "4000"), lambda: compiler.version):
        with pytest.raises(DeviceError, match=message):
            call()
    assert not list(Path(tempfile.gettempdir()).iterdir())


def test_a_program_that_is_not_there_cannot_be_started(model):
    launch = Launch(("/nowhere/wine64", "npu.exe"), {}, "the fake compiler", "mend it")
    with (
        ChildCompiler(launch) as compiler,
        pytest.raises(DeviceError, match=r"cannot be started \(.*: mend it"),
    ):
        compiler.compile(model, "4000")


INTERRUPTED = """
import os, signal, sys, tempfile, threading
import openvino as ov
import psutil
from openvino import opset13 as ops
from staticllm.compiler_passes.npu_compiler.child_compiler import ChildCompiler, Launch

tempfile.tempdir = sys.argv[2]
value = ops.parameter([1, 4], ov.Type.f32)
launch = Launch((sys.executable, sys.argv[1], "hangs"), {"MARK": "1"}, "the fake compiler", "mend it")
with ChildCompiler(launch) as compiler:
    assert compiler.version
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        compiler.compile(ov.Model([ops.relu(value)], [value], "a small model"), "4000", seconds=60)
    except KeyboardInterrupt:
        print("interrupted,", len(psutil.Process().children(recursive=True)), "children,", os.listdir(sys.argv[2]))
"""
"""What a user's program sees of Ctrl-C. It is a process of its own: one that runs tests may not survive its own signals."""


@pytest.mark.skipif(sys.platform == "win32", reason="it has no signals")
def test_ctrl_c_ends_the_child_and_removes_its_folder(scratch):
    command = [sys.executable, "-c", INTERRUPTED, str(CHILD), str(scratch)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "interrupted, 0 children, []\n"
    assert done.returncode == 0


def test_a_deleted_compiler_ends_its_child(compiler_of, model, scratch):
    before = processes()
    compiler = ChildCompiler(Launch((sys.executable, str(CHILD), ""), {}, "the fake compiler", "mend it"))
    compiler.compile(model, "4000")
    assert processes() - before
    del compiler
    assert not processes() - before
    assert not list(scratch.iterdir())


def test_weights_that_the_disk_has_no_room_for_are_refused(compiler_of, model, monkeypatch):
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr("staticllm.compiler_passes.npu_compiler.child_compiler.shutil.disk_usage", lambda path: usage)
    with pytest.raises(
        DeviceError, match=r"has 0\.0 MB of weights, .* has room for 0\.0 MB: free space there, or set TMPDIR"
    ):
        compiler_of().compile(model, "4000")


def test_without_a_temporary_folder_nothing_starts(compiler_of, model, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(DeviceError, match=r"no temporary folder can be made .*: set TMPDIR"):
        compiler_of().compile(model, "4000")
    monkeypatch.undo()


def test_threads_compile_one_after_another(compiler_of, model):
    compiler = compiler_of()
    found = {}

    def run(number):
        found[number] = compiler.compile(model, "4000", {"NPU_TILES": str(number)}).blob.decode()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {number: f"NPU_TILES={number}\t" in text for number, text in found.items()} == dict.fromkeys(
        range(1, 6), True
    )


def test_the_folder_of_a_killed_process_is_removed_by_the_next(compiler_of, model, scratch, monkeypatch):
    killed = scratch / "staticllm-npu-killed"
    killed.mkdir()
    (killed / "lock").touch()
    compiler = compiler_of()
    compiler.compile(model, "4000")
    assert killed.is_dir(), "it may be a folder that is being made"
    old = time.time() - 2 * scratch_folder.YOUNG_SECONDS
    for folder in scratch.iterdir():
        os.utime(folder, (old, old))
    other = compiler_of()
    assert other.version
    assert not killed.exists()
    assert compiler.compile(model, "4000").blob, "a folder that is in use stays"
