"""Tests what is predicted of a model on an NPU elsewhere, with a compiler whose prices are known, and with the real one."""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import replace

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops
from support import command_line
from support.encoders.encoder_directories import a_directory
from support.models.compressed_weights import compress
from support.npu_compiler import fake_child
from support.npu_compiler.priced import TAIL_US, PricedCompiler, block_us

from staticllm.cli import npu_platform
from staticllm.compiler_passes.artifacts.stored_chain import stems_of
from staticllm.compiler_passes.compiling.npu_platform import PLATFORMS
from staticllm.compiler_passes.npu_compiler import find
from staticllm.compiler_passes.npu_compiler.child_compiler import ChildCompiler, Launch
from staticllm.devices import check_known
from staticllm.errors import ConfigError, DeviceError, quoted
from staticllm.pipelines.diagnostics.doctor import SYMMETRIC_4_BIT, SYMMETRIC_8_BIT, check_weights, examine
from staticllm.pipelines.diagnostics.kinds import diagnosis_of, job_in
from staticllm.pipelines.diagnostics.npu_reports import NOT_REPEATING
from staticllm.pipelines.loading.export import export_set
from staticllm.pipelines.loading.npu_target import NPUTarget

LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 16
"""Of the tiny model ``qwen2``."""
SHORT = {"MAX_PROMPT_LEN": 128, "MIN_RESPONSE_LEN": 64, "MAX_NUM_SEQS": 1}
SHORT_OPTIONS = ("--max-prompt-len", 128, "--min-response-len", 64, "-p", "MAX_NUM_SEQS=1")
ON_4000 = ("--device", "NPU", "--platform", "4000")


def job_for(model, compiler, platform="4000", **properties):
    job = job_in(model, "NPU", properties, check=check_known)
    return replace(job, target=NPUTarget(PLATFORMS[platform], (compiler,)))


def asked(question, job):
    return getattr(diagnosis_of(job.kind.name), question)(job)


@pytest.fixture
def priced(monkeypatch):
    """A function that lets the commands find a compiler with known prices, and returns it."""

    def found(compiler):
        monkeypatch.setattr(npu_platform, "MOST_COMPILERS", 1)  # what compiles first is then known
        monkeypatch.setattr(find, "find_compiler", lambda kind: compiler)
        return compiler

    return found


def test_times_are_the_sums_of_the_parts_in_the_chunks_of_the_engine(zoo):
    compiler = PricedCompiler(lambda rows, kv_len: 1e5 if rows == 1024 else block_us(rows, kv_len))
    found = asked("estimate_on_npu", job_for(zoo / "qwen2", compiler))

    def ms(rows, kv_len):
        return (LAYERS * block_us(rows, kv_len) + TAIL_US) / 1e3

    short, longest = found.times.prompts
    assert (short.num_tokens, short.programs) == (128, ("prefill[128x0]",))
    assert short.ms == pytest.approx(ms(128, 0))
    assert longest.num_tokens == 1024
    assert longest.programs == ("prefill[512x0]", *["prefill[128x1152x16]"] * 4), "1024 rows at once are too dear"
    assert longest.ms == pytest.approx(ms(512, 0) + 4 * ms(128, 1152))
    (token,) = found.times.tokens
    assert (token.kv_len, token.ms) == (1151, pytest.approx(ms(1, 1151)))
    assert (found.times.packed.sequences, found.times.packed.kv_len) == (16, 1152)
    assert found.times.packed.over_one == pytest.approx(ms(16, 1152) / ms(1, 1151))
    assert found.repriced is None
    assert found.device_calls == LAYERS + 1


def test_kv_lengths_are_the_smallest_and_the_longest(zoo):
    found = asked("estimate_on_npu", job_for(zoo / "qwen2", PricedCompiler(), MIN_RESPONSE_LEN=4000, MAX_NUM_SEQS=1))
    assert [token.kv_len for token in found.times.tokens] == [1152, 5024]
    assert found.times.packed is None
    first, last = found.times.tokens
    assert last.ms - first.ms == pytest.approx(LAYERS * (5024 - 1152) / 64 / 1e3)


def test_both_prices_of_4_bit_weights_are_there(zoo):
    found = asked("estimate_on_npu", job_for(zoo / "qwen2", PricedCompiler(share=0.5), **SHORT))
    for priced, repriced in (
        *zip(found.times.prompts, found.repriced.prompts, strict=True),
        *zip(found.times.tokens, found.repriced.tokens, strict=True),
    ):
        assert repriced.ms == pytest.approx(priced.ms / 2)
    text = "\n".join(found.lines())
    assert "4-bit reads by their bytes" in text
    assert "charges reads of 4-bit weights like 16-bit ones" in text


class OneBlob(PricedCompiler):
    """A compiler whose programs have all the same bytes."""

    def compile(self, *arguments, **options):
        return replace(super().compile(*arguments, **options), blob=b"one")


def test_parts_with_equal_blobs_keep_their_own_times(zoo):
    found = asked("estimate_on_npu", job_for(zoo / "qwen2", OneBlob()))
    assert found.times == asked("estimate_on_npu", job_for(zoo / "qwen2", PricedCompiler())).times


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_roof_is_the_time_of_all_weights_and_kv_slots(zoo, platform):
    found = asked("estimate_on_npu", job_for(zoo / "qwen2", PricedCompiler(), platform, **SHORT))
    model = ov.Core().read_model(zoo / "qwen2" / "openvino_model.xml")
    products = (node.input_value(1) for node in model.get_ops() if node.get_type_name() == "MatMul")
    matrices = [constant for constant in map(constant_of, products) if constant is not None]
    smallest = sum(each.get_byte_size() for each in matrices)
    (token,) = found.times.tokens
    decode = found.compiled.programs[0]
    kv_bytes = LAYERS * 2 * KV_HEADS * HEAD_DIM * token.kv_len * 2
    assert smallest <= decode.read_bytes - kv_bytes <= found.bytes["weights"]
    assert decode.roof_us == pytest.approx(decode.read_bytes / PLATFORMS[platform].dma_bytes_per_us)
    assert token.over_roof == pytest.approx(decode.us / decode.roof_us)


def constant_of(output):
    node = output.get_node()
    while node.get_type_name() in ("Convert", "Reshape", "Multiply"):
        node = node.input_value(0).get_node()
    return node if node.get_type_name() == "Constant" else None


def test_memory_has_weights_once_slots_buffers_and_blobs(zoo, tmp_path):
    compiler = PricedCompiler()
    job = job_for(zoo / "qwen2", compiler, **SHORT)
    found = asked("estimate_on_npu", job)
    assert found.bytes["weights"] <= (zoo / "qwen2" / "openvino_model.bin").stat().st_size
    assert found.bytes["KV slots"] == LAYERS * 2 * KV_HEADS * HEAD_DIM * job.config.num_kv_slots("separate") * 2
    assert found.bytes["blobs"] == sum(map(len, map(str.encode, compiler.compiled)))
    assert found.needed == sum(found.bytes.values())
    assert found.compiled.compile_seconds == pytest.approx(0.5 * len(compiler.compiled))
    assert found.fits is None
    names = list(compiler.compiled)
    export_set(job, tmp_path / "set")
    assert compiler.compiled[len(names) :] == names, "the same parts as those of a set"


def test_inspect_says_how_the_programs_were_split(zoo):
    found = asked("report_on_npu", job_for(zoo / "qwen2", PricedCompiler(), **SHORT)).compiled
    for program in found.programs:
        block, tail = program.calls
        assert (block.role, block.count, block.layers) == ("block", LAYERS, 1)
        assert (tail.role, tail.count, tail.layers) == ("tail", 1, 0)
        us = LAYERS * found.parts[block.index].us + found.parts[tail.index].us
        assert program.us == pytest.approx(us)
        assert found.parts[block.index].operations["MatMul"] >= 4
        assert found.parts[tail.index].operations["MatMul"] == 1
    assert len({program.calls[-1].index for program in found.programs}) == 1, "the head is compiled once"
    part = found.parts[0]
    assert [(kind.kind, kind.total) for kind in part.kinds] == [("MatMul", part.us + 3.0), ("Softmax", 4.0)]


def test_a_model_without_repeating_layers_is_noted(zoo, tmp_path):
    model = ov.Core().read_model(zoo / "qwen2" / "openvino_model.xml")
    changed = 0
    for node in model.get_ordered_ops():  # attention and feed-forward of each layer get another number of operations
        name = node.get_friendly_name()
        if node.get_type_name() == "MatMul" and ("mlp.down_proj" in name or "self_attn.o_proj" in name):
            readers = node.output(0).get_target_inputs()
            last = node
            for _ in range(changed):
                last = ops.sigmoid(last)
            for reader in readers if changed else ():
                reader.replace_source_output(last.output(0))
            changed += 1
    assert changed == 2 * LAYERS
    folder = saved(model, tmp_path)
    report = asked("report_on_npu", job_for(folder, PricedCompiler(), **SHORT))
    assert not any(program.repeats for program in report.compiled.programs)
    assert any(NOT_REPEATING in line for line in report.lines())
    estimate = asked("estimate_on_npu", job_for(folder, PricedCompiler(), **SHORT))
    assert NOT_REPEATING in estimate.lines()


def test_an_encoder_has_the_times_of_its_programs(tmp_path):
    a_directory(tmp_path)
    found = asked("estimate_on_npu", job_for(tmp_path, PricedCompiler(), PROGRAMS="blocks"))
    assert found.times is None
    text = "\n".join(found.lines())
    assert all(program.program in text for program in found.compiled.programs)


def test_commands_print_the_values_and_end_the_compiler(zoo, priced):
    for command, question in (("plan", "estimate_on_npu"), ("inspect", "report_on_npu")):
        compiler = priced(PricedCompiler())
        expected = asked(question, job_for(zoo / "qwen2", PricedCompiler(), **SHORT))
        done = command_line.in_here(command, zoo / "qwen2", *ON_4000, *SHORT_OPTIONS, "--json")
        assert json.loads(done.stdout) == json.loads(json.dumps(expected.as_dict()))
        assert compiler.is_closed
        text = command_line.in_here(command, zoo / "qwen2", *ON_4000, *SHORT_OPTIONS).stdout
        assert text == "\n".join(expected.lines()) + "\n"


@pytest.mark.parametrize("layout", ["shared", "separate"])
def test_an_npu_elsewhere_takes_programs_in_blocks_only(zoo, priced, tmp_path, layout):
    compiler = priced(PricedCompiler())
    target = tmp_path / "set"
    command = ("compile", zoo / "qwen2", *ON_4000, *SHORT_OPTIONS, "-p", f"PROGRAMS={layout}", "--export-blob", target)
    done = command_line.in_here(*command)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.endswith(f"PROGRAMS={layout}, and --platform compiles programs in blocks only: leave PROGRAMS out")
    assert not compiler.compiled
    assert not target.exists()


def test_traces_are_one_file_per_part(zoo, priced, tmp_path):
    compiler = priced(PricedCompiler())
    folder = tmp_path / "traces"
    command = ("inspect", zoo / "qwen2", *ON_4000, *SHORT_OPTIONS, "--trace", folder)
    assert command_line.in_here(*command).returncode == 0
    files = sorted(folder.iterdir())
    assert [json.loads(file.read_text())["name"] for file in files] == compiler.compiled
    assert all(file.name.replace("-", "").replace(".json", "").isalnum() for file in files)
    again = command_line.in_here(*command)
    assert again.returncode == 1
    assert f"{quoted(folder)} exists already: give another folder" in again.stderr
    assert again.stderr.count("\n") == 1
    assert sorted(folder.iterdir()) == files
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "--device", "NPU", "--platform", "9999"), "platform '9999' is not known: use one of 3720"),
        (("inspect", "--device", "NPU", "--platform", "9999"), "platform '9999' is not known: use one of 3720"),
        (("plan", "--platform", "4000"), "--platform 4000 is of an NPU, and the device is 'CPU': give --device NPU"),
        (("inspect", "--platform", "4000"), "--platform 4000 is of an NPU, and the device is 'CPU': give --device NPU"),
        (("plan", *ON_4000, "--measured"), "the NPU of --platform is elsewhere: leave one of them out"),
        (("inspect", "--trace", "x"), "--trace writes schedules of the NPU compiler: add --device NPU --platform P"),
        (
            ("plan", *ON_4000, "--programs", "separate"),
            "--platform compiles programs in blocks only: leave PROGRAMS out",
        ),
        (("inspect", *ON_4000, "--trace", "/proc/x"), "'/proc/x' cannot be written"),
        (("inspect", *ON_4000, "--trace", "/no/such/x"), "'/no/such/x' cannot be written (No such file or directory)"),
        (("doctor", "--platform", "9999"), "platform '9999' is not known: use one of 3720"),
        (("doctor", "--platform", "4000"), "--platform 4000 examines the weights of a model: give MODEL"),
    ],
)
def test_bad_input_gets_one_line(priced, arguments, message):
    compiler = priced(PricedCompiler())
    done = command_line.in_here(*arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not compiler.compiled


def test_a_compiler_that_crashes_for_one_part_gets_one_line_and_no_traces(zoo, priced, tmp_path):
    launch = Launch((sys.executable, fake_child.__file__, "ok,dies"), {}, "the fake compiler", "mend it")
    priced(ChildCompiler(launch))
    done = command_line.in_here("inspect", zoo / "qwen2", *ON_4000, *SHORT_OPTIONS, "--trace", tmp_path / "traces")
    assert (done.returncode, done.stdout) == (1, "")
    assert "the NPU compiler crashed on part2 of generate[1x192] for platform 4000" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
    with pytest.raises(DeviceError, match=r"crashed on block1 of generate"):
        asked("estimate_on_npu", job_for(zoo / "qwen2", PricedCompiler(refused="block"), **SHORT))


def test_programs_that_are_not_in_blocks_are_refused(zoo):
    with pytest.raises(ConfigError, match="PROGRAMS=shared, and --platform compiles programs in blocks only"):
        asked("estimate_on_npu", job_for(zoo / "qwen2", PricedCompiler(), PROGRAMS="shared", **SHORT))


@pytest.mark.parametrize(
    ("kind", "group", "options"),
    [
        ("u8", 0, SYMMETRIC_8_BIT),
        ("u4", 0, SYMMETRIC_4_BIT),
        ("u4", 16, SYMMETRIC_4_BIT),
        ("i8", 0, ""),
        ("i4", 16, ""),
    ],
)
def test_doctor_says_what_to_export_if_weights_have_zero_points(zoo, tmp_path, kind, group, options):
    model = ov.Core().read_model(zoo / "qwen2" / "openvino_model.xml")
    count = compress(model, kind, group)
    written = saved(model, tmp_path)
    found = list(check_weights(str(written)))
    assert bool(found) == bool(options)
    for finding in found:
        assert finding.level == "warn"
        assert finding.value.startswith(f"{count} of {count} matrices have {kind[1]}-bit weights with zero points")
        assert options in finding.remedy


def test_zero_points_in_the_middle_of_the_range_are_none(tmp_path):
    weights = ops.constant(np.full((8, 16), 128, np.uint8))
    shifted = ops.subtract(
        ops.convert(weights, "f32"), ops.convert(ops.constant(np.full((8, 1), 128, np.uint8)), "f32")
    )
    scaled = ops.multiply(shifted, ops.constant(np.ones((8, 1), np.float32)))
    value = ops.parameter([1, 16], ov.Type.f32)
    model = ov.Model([ops.matmul(value, scaled, False, True)], [value], "symmetric")
    assert not list(check_weights(str(saved(model, tmp_path))))


def saved(model, folder):
    (folder / "config.json").write_text("{}")
    ov.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    return folder


def test_doctor_speaks_of_npus_only_where_one_is_concerned(zoo, tmp_path):
    model = ov.Core().read_model(zoo / "qwen2" / "openvino_model.xml")
    compress(model, "u8")
    path = str(saved(model, shutil.copytree(zoo / "qwen2", tmp_path / "model")))
    for how, is_said in (({}, False), ({"platform": "4000"}, True), ({"devices": ("NPU",)}, True)):
        names = [finding.name for finding in examine(model=path, **how)]
        assert ("weights on NPU" in names) == (is_said or "NPU" in ov.Core().available_devices)


@pytest.mark.slow
@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_real_compiler_predicts_what_its_set_has(zoo, tmp_path, platform):
    try:
        compiler = find.find_compiler()
    except DeviceError as error:
        pytest.skip(str(error))
    with compiler:
        job = job_for(zoo / "qwen2", compiler, platform, **SHORT)
        found = asked("estimate_on_npu", job)
        export_set(job, tmp_path / "set")
    assert all(1 < token.over_roof < 1000 for token in found.times.tokens)
    assert math.isclose(found.times.tokens[0].ms, found.compiled.programs[0].us / 1e3)
    stems = stems_of([path.name for path in (tmp_path / "set").iterdir()])
    blobs = [(tmp_path / "set" / name).stat().st_size for stem, name in stems.items() if stem.endswith("-device")]
    assert sorted(blobs) == sorted(part.blob_bytes for part in found.compiled.parts)
    assert found.compiled.compiler == compiler.version
    assert found.repriced is None, "its weights are no 4-bit ones"
