"""Weights and KV slots of programs in blocks are in memory of the device, if it has memory of its own."""

from __future__ import annotations

import numpy as np
import openvino as ov
import pytest
from support.helpers import EXACT

from staticllm import StaticLLMPipeline
from staticllm.compiler_passes.artifacts.stored_chain import BANK, WEIGHTS, ChainFiles, read_bank
from staticllm.compiler_passes.compiling.weight_bank import WeightBank, Weights
from staticllm.errors import ConfigError
from staticllm.kvcache.arena import Arena
from staticllm.pipelines.loading import decoder_kind, import_set, kind

SIZES = {"PROGRAMS": "blocks", "MAX_PROMPT_LEN": 64, "MIN_RESPONSE_LEN": 32, "MAX_NUM_SEQS": 2, **EXACT}


class Device:
    """Stands for a device's memory: remembers what was allocated."""

    def __init__(self, limit=1 << 40):
        self.blocks = []
        self.left = limit

    def allocate(self, num_bytes):
        self.left -= num_bytes
        if self.left < 0:
            raise MemoryError("the device is full")
        self.blocks.append(np.full(num_bytes, 255, np.uint8))
        return self.blocks[-1]

    def holds(self, array):
        first, end = array.ctypes.data, array.ctypes.data + array.nbytes
        return any(b.ctypes.data <= first and end <= b.ctypes.data + b.nbytes for b in self.blocks)


@pytest.fixture
def device(monkeypatch):
    found = Device()
    for module in (decoder_kind, kind, import_set):
        monkeypatch.setattr(module, "device_allocator", lambda core, name: found.allocate)
    return found


def test_weights_and_slots_are_in_the_memory_of_the_device(zoo, prompt_of, original, device, tmp_path):
    folder = tmp_path / "set"
    for properties in ({"EXPORT_BLOB": True, "BLOB_PATH": str(folder)}, {"BLOB_PATH": str(folder)}):
        device.blocks.clear()
        with StaticLLMPipeline(zoo / "qwen2", "CPU", **SIZES, **properties) as pipe:
            tokens = pipe.generate(np.array([prompt_of(30)]), max_new_tokens=20, ignore_eos=True).tokens[0]
            assert tokens == original(zoo / "qwen2").greedy(prompt_of(30), 20)
            arena = pipe.engine.runner.cache.arena
            assert all(map(device.holds, arena.blocks))
            bank = next(iter(pipe.engine.runner.programs.bound)).compiled.bank
            read = set().union(*(program.compiled.entries_of_device for program in pipe.engine.runner.programs.bound))
            assert all(
                device.holds(bank.tensor(number).data) == (number in read) for number in range(len(bank.entries))
            )
            tables = sum(entry.data.nbytes for number, entry in enumerate(bank.entries) if number not in read)
            assert tables, "the host alone reads the table of embeddings"
            sizes = sum(block.nbytes for block in device.blocks)
            assert sizes == arena.num_bytes + bank.num_bytes - tables, "each byte is there once"


def test_a_moved_bank_keeps_nothing_of_the_file(device):
    """The weights of a set are read as a whole, and must not stay in memory beside those of the device."""
    file = np.arange(64, dtype=np.uint8)
    bank = WeightBank(device.allocate)
    places = [(0, 16), (8, 32), (48, 16)]
    bank.entries = [Weights(file[first : first + size], (size,), ov.Type.u8) for first, size in places]
    bank.move([1])
    assert [block.nbytes for block in device.blocks] == [40], (
        "entries that overlap are together, the third is the host's"
    )
    for number, (first, size) in enumerate(places):
        assert np.array_equal(bank.tensor(number).data, file[first : first + size])
        assert not np.shares_memory(bank.entries[number].data, file)
    bank.settle([0, 1, 2])
    assert len(device.blocks) == 1


def test_weights_are_written_in_the_order_in_which_they_were_added():
    """Addresses are others in each process, so they must not decide about the bytes of a set."""
    memory = np.arange(64, dtype=np.uint8)
    bank = WeightBank()
    places = [(40, 8), (0, 8), (44, 12), (20, 8)]
    bank.entries = [Weights(memory[first : first + size], (size,), ov.Type.u8) for first, size in places]
    begin = memory.ctypes.data
    assert [(first - begin, size) for first, size in bank.regions] == [(40, 16), (0, 8), (20, 8)]
    files = ChainFiles(lambda part: b"")
    files.add_bank(bank)
    again = read_bank(b"".join(files.files[BANK]), b"".join(files.files[WEIGHTS]))
    for entry, (first, size) in zip(again.entries, places, strict=True):
        assert np.array_equal(entry.data, memory[first : first + size])


def test_a_full_device_is_one_line(zoo, device):
    device.left = 1000
    with pytest.raises(ConfigError, match="not enough memory for the KV slots") as found:
        StaticLLMPipeline(zoo / "qwen2", "CPU", **SIZES)
    assert "\n" not in str(found.value)


def test_slots_begin_with_zeros():
    """A slot that no row sees may be read, and must hold finite numbers."""
    from staticllm.core import KVState

    arena = Arena([KVState(0, "key", "k", 2, 4)], 8, Device().allocate)
    assert not arena.state_view(0, 8).any()


def test_a_bank_without_memory_of_a_device_copies_nothing(zoo):
    bank = WeightBank()
    bank.settle([])
    assert not bank.regions
