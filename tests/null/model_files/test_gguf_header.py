"""Tests the reader of GGUF headers: what it reads, and that damaged and hostile files get one line."""

from __future__ import annotations

import random
import struct

import gguf
import numpy as np
import pytest

from staticllm.errors import ModelError
from staticllm.model_files import gguf_header
from staticllm.model_files.gguf_header import read_gguf_header


def text(value):
    return struct.pack("<Q", len(value)) + value


def header_of(*, magic=b"GGUF", version=3, tensors=(), keys=(), num_tensors=None, num_keys=None):
    """Return the bytes of a header; each key is its name, type and bytes, each tensor its bytes."""
    counts = (len(tensors) if num_tensors is None else num_tensors, len(keys) if num_keys is None else num_keys)
    start = magic + struct.pack("<IQQ", version, *counts)
    return (
        start + b"".join(text(name) + struct.pack("<I", kind) + data for name, kind, data in keys) + b"".join(tensors)
    )


def tensor(name=b"t", shape=(32,), kind=0, offset=0):
    dimensions = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", len(shape)) + dimensions + struct.pack("<IQ", kind, offset)


@pytest.fixture
def whole(tmp_path):
    """A small file as the format's own library writes it."""
    path = tmp_path / "whole.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_token_list(["a", "b", "ü"])
    writer.add_token_scores([0.5, 1.5, -2.0])
    writer.add_key_value("own.flag", True, gguf.GGUFValueType.BOOL)
    writer.add_tensor("first", np.arange(64, dtype=np.float32).reshape(2, 32))
    quantised = gguf.quants.quantize(np.ones((4, 64), np.float32), gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("second", quantised, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_what_the_library_writes_is_read(whole):
    header = read_gguf_header(whole)
    reference = gguf.GGUFReader(whole)
    assert header.architecture == "llama"
    assert header.number("llama.block_count") == 2
    assert header.metadata["tokenizer.ggml.tokens"] == ["a", "b", "ü"]
    assert header.metadata["tokenizer.ggml.scores"].tolist() == [0.5, 1.5, -2.0]
    assert header.metadata["own.flag"] is True
    assert header.number("own.flag") is None
    found = [(each.name, each.offset, each.num_bytes, each.kind) for each in header.tensors]
    assert found == [(each.name, each.data_offset, each.n_bytes, each.tensor_type.name) for each in reference.tensors]
    data = np.fromfile(whole, np.float32, 64, offset=header.tensors[0].offset)
    assert data.tolist() == list(range(64))


@pytest.mark.parametrize(
    "data,said",
    [
        (b"", "the file ends"),
        (b"GGUF", "the version has 4 bytes at 4, and the file ends"),
        (header_of(magic=b"FUGG"), "does not begin with GGUF"),
        (header_of(version=1), "its version is 1, and 2 and 3 can be read): download a newer file"),
        (header_of(version=4), "its version is 4, and 2 and 3 can be read): install a newer version"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "is big-endian, and little-endian files can be read"),
        (header_of(num_tensors=1 << 60), f"the number of tensors is {1 << 60}, at most {gguf_header.MAX_TENSORS}"),
        (header_of(num_keys=1_000_000), "the number of keys is 1000000, at most"),
        (header_of(num_keys=1) + struct.pack("<Q", 1 << 40), "the length of a key"),
        (header_of(keys=[(b"a", 8, struct.pack("<Q", 4 << 30))]), "the length of 'a' is 4294967296"),
        (header_of(keys=[(b"a", 9, struct.pack("<IQ", 4, 1 << 61))]), "the number of 'a'"),
        (header_of(keys=[(b"a", 9, struct.pack("<IQ", 8, 1 << 61))]), "the number of 'a'"),
        (header_of(keys=[(b"a", 9, struct.pack("<IQI", 9, 1, 9))]), "only numbers and texts can be in arrays"),
        (header_of(keys=[(b"a", 77, b"")]), "has the unknown type 77"),
        (header_of(keys=[(b"a", 4, b"\0" * 4)] * 2), "the key 'a' is there twice"),
        (
            header_of(keys=[(b"general.alignment", 4, struct.pack("<I", 0))], tensors=[tensor()]),
            "general.alignment is 0",
        ),
        (
            header_of(keys=[(b"general.alignment", 4, struct.pack("<I", 48))], tensors=[tensor()]),
            "general.alignment is 48",
        ),
        (header_of(tensors=[tensor(shape=(32, 1 << 40, 1 << 40))]), "bytes at"),
        (header_of(tensors=[tensor(shape=(1 << 41,))]), "a dimension of tensor 't'"),
        (header_of(tensors=[tensor(shape=())]), "has 0 dimensions"),
        (header_of(tensors=[tensor(shape=(1,) * 5)]), "has 5 dimensions"),
        (header_of(tensors=[tensor(shape=(0,))]), "has the shape [0]"),
        (header_of(tensors=[tensor(shape=(33,), kind=3)]), "rows of Q4_1 have multiples of 32"),
        (header_of(tensors=[tensor(kind=4)]), "has the unknown type 4"),
        (header_of(tensors=[tensor(offset=8)]), "begins at 8, which is no multiple of 32"),
        (header_of(tensors=[tensor(offset=1 << 62)]), "bytes at"),
        (header_of(tensors=[tensor(), tensor()]) + bytes(512), "two tensors have the same name"),
    ],
)
def test_a_damaged_header_gets_one_line(data, said, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError) as error:
        read_gguf_header(path)
    assert said in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_one_of_several_parts_says_how_to_join_them(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(header_of(keys=[(b"split.count", 2, struct.pack("<H", 3))]))
    with pytest.raises(ModelError, match="is one of 3 parts: join them with"):
        read_gguf_header(path)


def test_a_file_that_is_none_gets_one_line(tmp_path):
    with pytest.raises(ModelError, match="cannot be read"):
        read_gguf_header(tmp_path)
    with pytest.raises(ModelError, match="cannot be read"):
        read_gguf_header(tmp_path / "missing.gguf")


def test_any_damage_is_read_or_gets_one_line(whole, num_cases):
    """Bytes are changed, cut and repeated; what is read never has more than the file."""
    good = whole.read_bytes()
    random.seed(7)
    for case in range(num_cases(5000)):
        data = bytearray(good)
        for _ in range(random.randint(1, 4)):
            place = random.randrange(min(len(data), 420) if case % 4 else len(data))
            if case % 3 == 0:
                data[place : place + 8] = random.choice(
                    (b"\xff" * 8, b"\0" * 8, struct.pack("<Q", 1 << random.randrange(64)))
                )
            else:
                data[place] = random.randrange(256)
        if case % 5 == 0:
            del data[random.randrange(len(data)) :]
        whole.write_bytes(data)
        try:
            header = read_gguf_header(whole)
        except ModelError as error:
            assert "\n" not in str(error)
        else:
            assert all(0 < each.offset <= each.offset + each.num_bytes <= len(data) for each in header.tensors)


@pytest.mark.parametrize("kind", gguf.GGMLQuantizationType, ids=str)
def test_types_of_the_format_are_known_by_name(kind, tmp_path):
    """Those that cannot be read too, so that the message can say what to take instead."""
    path = tmp_path / "model.gguf"
    path.write_bytes(header_of(tensors=[tensor(shape=(256,), kind=kind)]) + bytes(4096))
    assert [each.kind for each in read_gguf_header(path).tensors] == [kind.name]
