"""Tests how parts are compiled for an NPU that is elsewhere, and what a device is asked before their blobs are imported."""

from __future__ import annotations

import openvino as ov
import pytest
from openvino import opset13 as ops
from support.helpers import EXACT, FINGERPRINT

from staticllm import StaticLLMPipeline
from staticllm.compiler_passes.artifacts.fingerprint import Fingerprint
from staticllm.compiler_passes.blocks.chain_model import ChainPart
from staticllm.compiler_passes.compiling.chain import HostPart, PartBlob
from staticllm.compiler_passes.compiling.npu_compiler import NPUProgram
from staticllm.compiler_passes.compiling.npu_platform import PLATFORMS
from staticllm.compiler_passes.graph.step_graph import named_parameter, named_result
from staticllm.errors import BlobError
from staticllm.pipelines.loading import import_set
from staticllm.pipelines.loading.npu_target import NPUTarget, check_requirements

HERE = ov.get_version().partition("-")[0]
NEEDS = f"npu=4000;t=2;ov={HERE};c=8.4"


class Recorder:
    """A compiler that remembers the platform and the properties that it was given."""

    version = "a fake compiler"

    def __init__(self):
        self.given = []

    def compile(self, model, platform, properties=None, *, name="", seconds=1.0, with_schedule=True):
        self.given.append((platform, name, dict(properties)))
        return NPUProgram(b"blob", None, 0.1, NEEDS)


def part(rows, place="device", width=8):
    hidden = named_parameter("in0.hidden", ov.PartialShape([1, rows, width]), ov.Type.f32)
    keys = named_parameter("in1.port", ov.PartialShape([1, 2, 1024, width]), ov.Type.f32)
    results = [named_result("out0", ops.relu(hidden).output(0)), named_result("out1", ops.relu(keys).output(0))]
    return ChainPart("block1", place, ov.Model(results, [hidden, keys], "block1"), "key")


@pytest.mark.parametrize("number", PLATFORMS)
def test_few_rows_get_few_tiles_and_others_all(number):
    compiler = Recorder()
    target = NPUTarget(PLATFORMS[number], (compiler,))
    for rows in (1, 16, 17, 128):
        compiled = target.compile_part(part(rows), "NPU", {}, "it")
        assert compiled == PartBlob("block1", b"blob", NEEDS)
    tiles = [properties["NPU_TILES"] for _, _, properties in compiler.given]
    assert tiles == ["2", "2", str(PLATFORMS[number].tiles), str(PLATFORMS[number].tiles)]
    assert {(platform, name) for platform, name, _ in compiler.given} == {(number, "block1 of it")}


def test_properties_are_text_and_those_of_the_user_win():
    compiler = Recorder()
    given = {"NPU_TILES": 1, "NPU_TURBO": True, "PERF_COUNT": False, "INFERENCE_PRECISION_HINT": ov.Type.f16}
    NPUTarget(PLATFORMS["4000"], (compiler,)).compile_part(part(1), "NPU", given, "it")
    ((_, _, properties),) = compiler.given
    assert properties == {
        "NPU_TILES": "1", "NPU_TURBO": "YES", "PERF_COUNT": "NO", "INFERENCE_PRECISION_HINT": "f16"
    }  # fmt: skip


def test_the_part_of_the_host_is_compiled_here():
    compiler = Recorder()
    assert isinstance(
        NPUTarget(PLATFORMS["4000"], (compiler,)).compile_part(part(1, "host"), "NPU", {}, "it"), HostPart
    )
    assert not compiler.given


class Device:
    """Answers what it is asked about a blob, or raises."""

    def __init__(self, answer):
        self.answer = answer

    def get_property(self, device, name, asked):
        assert (device, name) == ("NPU", "COMPATIBILITY_CHECK")
        assert list(asked) == ["RUNTIME_REQUIREMENTS"]
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize("answer", ["SUPPORTED", "CompatibilityCheck.SUPPORTED", TypeError("no such type in Python")])
def test_a_device_that_can_run_a_blob_gets_it(answer):
    check_requirements(Device(answer), "NPU", NEEDS)


@pytest.mark.parametrize(
    ("answer", "needs", "message"),
    [
        ("UNSUPPORTED", NEEDS, r"cannot run a blob that needs npu=4000.*\(UNSUPPORTED\): compile it for this NPU"),
        ("NOT_APPLICABLE", NEEDS, "cannot run a blob"),
        (TypeError("no such type"), NEEDS.replace(f"ov={HERE}", "ov=2020.1.0"), f"another OpenVINO than {HERE}"),
        (TypeError("no such type"), "npu=4000", f"another OpenVINO than {HERE}"),
        (RuntimeError("unknown property"), NEEDS, "does not say whether it can run a blob .*: update its driver"),
        ("SUPPORTED", "", "does not say what it needs: compile it"),
    ],
)
def test_a_blob_that_a_device_cannot_run_is_refused_in_one_line(answer, needs, message):
    with pytest.raises(BlobError, match=message) as found:
        check_requirements(Device(answer), "NPU", needs)
    assert "\n" not in str(found.value)


SHORT = {"MAX_PROMPT_LEN": 64, "MIN_RESPONSE_LEN": 32, "MAX_NUM_SEQS": 2, **EXACT}


def test_loading_a_set_asks_the_device_about_each_requirement_once(zoo, tmp_path, monkeypatch):
    blobs = {"BLOB_PATH": str(tmp_path / "set"), **SHORT}
    StaticLLMPipeline(zoo / "qwen2", "CPU", PROGRAMS="blocks", EXPORT_BLOB=True, **blobs).close()
    asked = []

    def read_chain(data, bank):
        stored = import_set_read_chain(data, bank)
        assert stored.requirements == ("",), "the programs of this machine need nothing else"
        return type(stored)(stored.plan, stored.files, needs)

    import_set_read_chain = import_set.read_chain
    monkeypatch.setattr(import_set, "read_chain", read_chain)
    monkeypatch.setattr(import_set, "check_requirements", lambda core, device, needs: asked.append((device, needs)))
    needs = ("",)
    StaticLLMPipeline(zoo / "qwen2", "CPU", **blobs).close()
    assert not asked
    needs = ("npu=4000", "npu=3720")
    StaticLLMPipeline(zoo / "qwen2", "CPU", **blobs).close()
    assert asked == [("CPU", "npu=4000"), ("CPU", "npu=3720")]
    monkeypatch.setattr(Fingerprint, "is_elsewhere", True)
    needs = ("",)
    asked.clear()
    StaticLLMPipeline(zoo / "qwen2", "CPU", **blobs).close()
    assert asked == [("CPU", "")], "a set that was compiled elsewhere must say what its blobs need"


def test_a_set_for_another_platform_is_refused():
    of_set = {"device": "NPU", "device_name": "", "platform": "4000", "capabilities": "", "plugin": "", "openvino": "1"}
    there = Fingerprint(**{**FINGERPRINT.__dict__, **of_set, "compiler": "elsewhere"})
    machine = {"device": "NPU", "device_name": "an NPU", "platform": "4000", "driver": "5", "compiler": "8.4"}
    here = Fingerprint(**{**FINGERPRINT.__dict__, **machine})
    assert there.is_elsewhere
    assert here.difference(there) is None, "the device is asked about the rest"
    other = Fingerprint(**{**FINGERPRINT.__dict__, **machine, "platform": "3720"})
    assert other.difference(there) == "NPU platform 3720, blob 4000"
    assert Fingerprint(**{**FINGERPRINT.__dict__, **machine, "passes": "other"}).difference(there) is not None
