"""Tests that programs which run a stateful model by themselves get the original's logits from our engine."""

import threading
import time

import numpy as np
import openvino as ov
import pytest

from staticllm.compiler_passes.compiling import compile as compile_programs
from staticllm.daemon.packed import model as module
from staticllm.daemon.packed.model import PackedModel
from staticllm.daemon.sharing.devices import Devices
from staticllm.errors import ClosedError, PromptError
from staticllm.pipelines.engine.engine import Engine
from tests.support.attach.packed_programs import EXACT, SHORT, TOLERANCE, Original, Program

PACKED = ["demo", "llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "bloom", "opt", "phi3"))]


@pytest.mark.parametrize("name", PACKED)
def test_one_sequence_has_the_logits_of_the_original(name, program_on):
    program = program_on(name)
    for columns in (9, 1, 1, 1, 100, 1, 3, 1):  # a second turn without a reset
        program.step(1, columns)
    program.reset()
    program.step(1, 70)
    program.step(1, 1)
    assert program.requests[0].fallback is None


@pytest.mark.parametrize("name", PACKED)
def test_a_batch_with_left_padding_and_beams_has_the_logits_of_the_original(name, program_on):
    program = program_on(name)
    program.step(3, 20, padding=(0, 7, 19))
    for _ in range(3):
        program.step(3, 1)
    program.step(3, 1, beams=[2, 2, 0])
    program.step(6, 1, beams=[0, 0, 1, 2, 2, 1])
    program.step(2, 2, beams=[5, 3])
    program.step(1, 1, beams=[1])
    program.step(4, 1, beams=[0, 0, 0, 0])
    program.reset()
    program.step(2, 5, padding=(1, 0))
    assert program.requests[0].fallback is None


def test_more_rows_than_places_and_slots_have_the_logits_of_the_original(program_on):
    program = program_on("llama")
    program.step(20, 100, padding=range(20))
    for _ in range(3):
        program.step(20, 1)
    assert program.requests[0].fallback is None


def test_hidden_tokens_may_be_anywhere(program_on):
    program = program_on("llama")
    program.step(2, 6, padding=(2, 0))
    program.step(2, 3, padding=(3, 1))  # a row of the call has no token at all
    program.step(2, 1)
    assert program.requests[0].fallback is None


@pytest.mark.parametrize("name", ["gemma2", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_a_hidden_token_counts_in_the_windows_of_the_original(name, program_on):
    """Its window is 32 columns, and our engine, which drops hidden tokens, would see one token more."""
    program = program_on(name)
    program.step(2, 8, padding=(3, 0))
    program.step(2, 1, padding=(1, 0))
    for _ in range(8):
        program.step(2, 1)
    assert program.requests[0].fallback is None
    for _ in range(30):
        program.step(2, 1)
    assert "hidden tokens inside" in program.requests[0].fallback


def test_only_the_last_logits_if_the_program_says_so(program_on):
    program = program_on("llama")
    ours, native = program.requests
    for columns in (30, 1, 70):
        inputs = program.inputs(2, columns)
        last, all_rows = ours.infer(inputs, wanted="last"), native.infer(inputs)
        assert last.shape == (2, 1, all_rows.shape[2])
        assert np.abs(last[:, 0] - all_rows[:, -1]).max() <= TOLERANCE * np.ptp(all_rows)


def changed(inputs, name, change):
    inputs = {key: np.array(array) for key, array in inputs.items()}
    change(inputs[name])
    return inputs


UNUSUAL = {
    "earlier tokens": lambda inputs: changed(inputs, "attention_mask", lambda mask: mask.__setitem__((0, 6), 0)),
    "position_ids are not": lambda inputs: changed(inputs, "position_ids", lambda positions: positions.__iadd__(3)),
    "outside the vocabulary": lambda inputs: changed(
        inputs, "input_ids", lambda ids: ids.__setitem__((0, -1), 1 << 30)
    ),
    "shape": lambda inputs: inputs | {"attention_mask": np.ones((2, 40), np.int64)},
    "values other": lambda inputs: changed(inputs, "attention_mask", lambda mask: mask.__setitem__((1, -1), 2)),
}


@pytest.mark.parametrize("what", UNUSUAL)
def test_an_unusual_call_gives_what_the_original_gives_until_the_reset(what, program_on):
    program = program_on("llama")
    ours, native = program.requests
    program.step(2, 12, padding=(0, 4))
    program.step(2, 1, beams=[1, 1])
    unusual = UNUSUAL[what](program.inputs(2, 2))
    try:
        expected = native.infer(unusual)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            ours.infer(unusual)
    else:
        assert np.abs(ours.infer(unusual) - expected).max() <= TOLERANCE * np.ptp(expected)
        program.step(2, 1)
    assert what in ours.fallback
    program.reset()
    program.step(2, 5)
    assert ours.fallback is None


def test_a_sequence_longer_than_the_engine_goes_on_in_the_original(program_on):
    program = program_on("llama")
    program.step(1, 250)
    program.step(1, 20)
    assert "room for 256" in program.requests[0].fallback
    program.step(1, 1)


def test_states_are_those_of_the_original(program_on):
    program = program_on("llama")
    ours, native = program.requests
    program.step(2, 12, padding=(0, 3))
    program.step(2, 1)
    states = native.request.query_state()
    assert ours.state_names() == [state.name for state in states]
    seen = ours.get_state(3)
    assert seen.shape == states[3].state.data.shape
    assert np.abs(seen - states[3].state.data)[0].max() <= 1e-5 * np.ptp(seen)
    program.step(2, 1)
    for index in range(len(states)):
        ours.set_state(index, ours.get_state(index))
    program.step(2, 1)
    ours.reset_state(0)
    native.request.query_state()[0].reset()
    assert not ours.get_state(0).size
    program.reset()
    program.step(1, 4)
    assert ours.fallback is None


@pytest.mark.parametrize("name", ["lfm2", pytest.param("granitemoehybrid", marks=pytest.mark.slow)])
def test_a_recurrent_model_runs_as_it_is(name, program_on):
    program = program_on(name)
    program.step(1, 8)
    program.step(1, 1)
    program.reset()
    program.step(2, 5)
    assert "recurrent" in program.requests[0].fallback


def test_a_beam_of_another_batch_is_refused(program_on):
    program = program_on("llama")
    program.step(2, 4)
    ours = program.requests[0]
    with pytest.raises(PromptError, match="beam_idx has 2, the batch before had 2 rows"):
        ours.infer(program.inputs(2, 1) | {"beam_idx": np.array([0, 2])})


def test_programs_on_several_threads_share_calls(loaded, program_on):
    model, _ = loaded("llama")
    programs = [program_on("llama", seed) for seed in range(4)]

    def run(program):
        program.step(1, 30)
        for _ in range(25):
            program.step(1, 1)

    with model.engine.record() as trace:
        threads = [threading.Thread(target=run, args=(program,)) for program in programs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [program.mask.shape[1] for program in programs] == [55] * 4
    assert sum(len(step.decode) for step in trace.steps) == 100
    assert any(len(step.decode) > 1 for step in trace.steps)


def test_logits_do_not_depend_on_the_rows_of_others(loaded):
    """The slots must be the same in each round: the order of a sum over slots also changes its last bits."""
    model, _ = loaded("llama")
    seen = set()
    for seed in range(3):
        model.engine.run_between_steps(model.engine.core.device.kv_manager.clear)  # also cached sequences
        programs = [Program(model.open(), seed=5), *(Program(model.open(), seed=10 * seed + i) for i in range(3))]
        answers = [each.requests[0].infer(each.inputs(1, 12)) for each in programs][:1]
        with model.engine.record() as trace:
            for _ in range(4):
                answers.append(together(model, [each.inputs(1, 1) for each in programs], programs)[0])
        assert [len(step.decode) for step in trace.steps] == [4] * 4
        seen.add(b"".join(logits.tobytes() for logits in answers))
        for each in programs:
            each.requests[0].close()
    assert len(seen) == 1


def together(model, inputs, programs):
    """Run a call of each program while the engine is held, so that they reach it in this order. Return their logits."""
    gate, rows = threading.Event(), [None] * len(programs)

    def run(index):
        rows[index] = programs[index].requests[0].infer(inputs[index])

    model.engine.call_soon(gate.wait)
    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(programs))]
    waiting = model.engine.steps.callbacks
    while waiting:
        time.sleep(0.001)  # until the engine is held
    for thread, program in zip(threads, programs, strict=True):
        expected = len(waiting) + (1 if program.requests[0]._sequences else 2)  # it opens a sequence first
        thread.start()
        while len(waiting) < expected:
            time.sleep(0.001)
    gate.set()
    for thread in threads:
        thread.join()
    return rows


def test_an_ir_of_another_name_needs_no_other_file(tmp_path, zoo):
    for suffix in ("xml", "bin"):
        (tmp_path / f"a.{suffix}").write_bytes((zoo / "llama" / f"openvino_model.{suffix}").read_bytes())
    model = PackedModel(tmp_path / "a.xml", "CPU", EXACT | SHORT)
    request = model.open()
    ours = request.infer(Program().inputs(1, 6))
    original = Original(ov.Core().compile_model(str(tmp_path / "a.xml"), "CPU", EXACT))
    native = original.infer(Program().inputs(1, 6))
    assert np.abs(ours - native).max() <= TOLERANCE * np.ptp(native)
    assert request.fallback is None
    request.close()
    model.close()
    with pytest.raises(ClosedError):
        model.open().infer(Program().inputs(1, 6))


def test_an_engine_whose_model_cannot_be_shared_is_closed(zoo, monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    def start(*args):
        engines.append(Engine(*args))
        return engines[-1]

    engines = []
    monkeypatch.setattr(module, "Engine", start)
    monkeypatch.setattr(module, "OriginalModel", fail)
    with pytest.raises(MemoryError):
        PackedModel(zoo / "llama" / "openvino_model.xml", "CPU", EXACT | SHORT)
    (engine,) = engines
    with pytest.raises(ClosedError):
        engine.run_between_steps(lambda: None)


def test_only_a_device_has_a_scheduler(plain_model):
    devices = Devices()
    with pytest.raises(RuntimeError):
        PackedModel(plain_model, "NO_SUCH", {"NUM_STREAMS": 1}, devices=devices)
    model = PackedModel(plain_model, "AUTO", {}, devices=devices)
    assert "its inputs are" in model.reason
    assert not devices.schedulers
    model.close()
    PackedModel(plain_model, "CPU", {}, devices=devices).close()
    assert set(devices.schedulers) == {"CPU"}


def test_all_slots_are_free_after_the_last_request(loaded):
    model, _ = loaded("llama")
    request = model.open()
    program = Program(request)
    request.infer(program.inputs(3, 9))
    request.infer(program.inputs(5, 1, beams=[0, 0, 1, 2, 2]))
    request.close()
    request.close()

    def held():
        manager = model.engine.core.device.kv_manager
        return len(manager.idle), manager.cache.num_slots - manager.free_slots

    assert model.engine.run_between_steps(held) == (0, 0)


def test_a_second_start_imports_its_programs_from_a_cache(zoo, tmp_path, monkeypatch):
    xml = zoo / "llama" / "openvino_model.xml"
    options = {**EXACT, **SHORT, "CACHE_DIR": str(tmp_path), "PROGRAMS": "shared"}
    PackedModel(xml, "CPU", options).close()
    monkeypatch.setattr(
        compile_programs, "compile_programs", lambda *_: pytest.fail("compiled, although there is a set")
    )
    model = PackedModel(xml, "CPU", options)
    program = Program(model.open(), Original(ov.Core().compile_model(str(xml), "CPU", EXACT)))
    for columns in (9, 1, 100, 3):
        program.step(1, columns)
    assert program.requests[0].fallback is None
    model.close()
