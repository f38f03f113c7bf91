"""Blob sets of programs in blocks: every byte once, the same in every export, and nothing believed that is in them."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import openvino as ov
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.helpers import EXACT

from staticllm import StaticLLMPipeline
from staticllm.compiler_passes.artifacts.blob_set import read_manifest, read_stored
from staticllm.compiler_passes.artifacts.stored_chain import (
    BANK,
    WEIGHTS,
    ChainFiles,
    export_part,
    read_bank,
    read_chain,
    stems_of,
)
from staticllm.compiler_passes.compiling.weight_bank import WeightBank, Weights
from staticllm.errors import BlobError

SHORT = {"MAX_PROMPT_LEN": 64, "MIN_RESPONSE_LEN": 32, "MAX_NUM_SEQS": 2, **EXACT}


def export(model, folder):
    with StaticLLMPipeline(model, "CPU", PROGRAMS="blocks", EXPORT_BLOB=True, BLOB_PATH=str(folder), **SHORT) as pipe:
        return pipe.generate(np.arange(10, 40)[None], max_new_tokens=20, ignore_eos=True).tokens


def files_of(folder):
    stored = dict(read_stored(folder, read_manifest(folder)))
    return {stem: stored[name] for stem, name in stems_of(list(stored)).items()}


@pytest.fixture(scope="module")
def exported(zoo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets") / "set"
    return folder, export(zoo / "qwen2", folder)


def test_a_set_gives_the_tokens_of_the_programs_and_of_the_original(exported, zoo, original):
    folder, tokens = exported
    with StaticLLMPipeline(zoo / "qwen2", "CPU", BLOB_PATH=str(folder), **SHORT) as pipe:
        assert pipe.generate(np.arange(10, 40)[None], max_new_tokens=20, ignore_eos=True).tokens == tokens
    assert tokens[0] == original(zoo / "qwen2").greedy(list(range(10, 40)), 20)


def test_a_set_has_each_weight_once(exported, zoo):
    files = files_of(exported[0])
    model = (zoo / "qwen2" / "openvino_model.bin").stat().st_size
    bank = read_bank(files[BANK], files[WEIGHTS])
    assert sum(entry.data.nbytes for entry in bank.entries) <= model
    assert len(files[WEIGHTS]) <= model + 4096 * len(bank.entries)
    assert sum(stem.endswith("-device") for stem in files) < 2 * sum(stem.endswith("-host") for stem in files)


def test_two_exports_are_equal(exported, zoo, tmp_path):
    export(zoo / "qwen2", tmp_path / "again")
    first, again = files_of(exported[0]), files_of(tmp_path / "again")
    assert first.keys() == again.keys()
    different = {stem for stem in first if first[stem] != again[stem]}
    assert all(stem.endswith("-device") for stem in different), "the CPU numbers the nodes of a process in its blobs"


def test_weights_are_stored_in_the_order_of_their_entries_wherever_they_are_in_memory():
    def stored(places):
        memory = np.zeros(64, np.uint8)
        bank = WeightBank()
        for value, place in enumerate(places, 1):
            memory[place : place + 4] = value
            bank.entries.append(Weights(memory[place : place + 4], (4,), ov.Type.u8))
        chains = ChainFiles(export_part)
        chains.add_bank(bank)
        files = {stem: b"".join(pieces) for stem, pieces in chains.files.items()}
        assert [entry.data.tolist() for entry in read_bank(files[BANK], files[WEIGHTS]).entries] == [[1] * 4, [2] * 4]
        return files

    assert stored((0, 32)) == stored((32, 0))


def test_a_chain_that_names_what_does_not_exist_is_refused(exported):
    files = files_of(exported[0])
    bank = read_bank(files[BANK], files[WEIGHTS])
    stem = next(stem for stem in files if "generate" in stem)
    good = json.loads(files[stem])
    table = next(number for number, entry in enumerate(bank.entries) if len(entry.shape) == 2)
    scalar = len(bank.entries)
    bank.entries.append(Weights(np.zeros(4, np.uint8), (), ov.Type.f32))
    read_chain(json.dumps(good).encode(), bank)
    for change in (
        lambda chain: chain["calls"][0].update(part=99),
        lambda chain: chain["calls"][1]["inputs"][0].update(wire=99),
        lambda chain: chain["calls"][1]["inputs"].append({"entry": 10**6}),
        lambda chain: chain["calls"][1]["inputs"].append({"port": "no such port"}),
        lambda chain: chain["calls"][0]["outputs"].append({"entry": 0}),
        lambda chain: chain["calls"][-1]["outputs"].append({"port": "input_ids"}),
        lambda chain: chain["wires"].append({"type": "f32", "shape": [1 << 30, 1 << 10]}),
        lambda chain: chain["wires"].append({"type": "f33", "shape": [1]}),
        lambda chain: chain.update(calls=[]),
        lambda chain: chain.update(more=1),
        lambda chain: chain["calls"].reverse(),
        lambda chain: chain["calls"][0]["inputs"].append({"port": "input_ids", "entry": 10**6}),
        lambda chain: chain["calls"][0]["inputs"].append({"port": "mask.causal", "entry": table}),
        lambda chain: chain["calls"][0]["inputs"].append({"port": "input_ids", "entry": scalar}),
        lambda chain: chain["calls"][-1]["inputs"].append({"port": "mask.causal", "wire": 0}),
        lambda chain: chain["calls"][0]["outputs"].append({"port": "input_ids", "wire": 0}),
        lambda chain: [wire.update(shape=[7]) for wire in chain["wires"]],
    ):
        chain = json.loads(json.dumps(good))
        change(chain)
        with pytest.raises(BlobError, match="export it again") as found:
            read_chain(json.dumps(chain).encode(), bank)
        assert "\n" not in str(found.value)


@settings(
    max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(data=st.data())
def test_no_damage_to_a_chain_is_an_error_of_another_kind(exported, data):
    files = files_of(exported[0])
    bank = read_bank(files[BANK], files[WEIGHTS])
    stem = data.draw(st.sampled_from([BANK, *(stem for stem in files if "x" in stem)]))
    content = bytearray(files[stem])
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        if stem == BANK:
            read_bank(bytes(content), files[WEIGHTS])
        else:
            read_chain(bytes(content), bank)
    except BlobError as error:
        assert "\n" not in str(error)


def test_a_place_outside_of_the_weights_is_refused(exported):
    files = files_of(exported[0])
    index = msgspec.json.decode(files[BANK])
    for change in ({"offset": len(files[WEIGHTS])}, {"shape": [1 << 30, 1 << 30]}, {"type": "string"}, {"offset": -1}):
        entries = [{**index["entries"][0], **change}, *index["entries"][1:]]
        with pytest.raises(BlobError, match="export it again"):
            read_bank(msgspec.json.encode({"entries": entries}), files[WEIGHTS])
