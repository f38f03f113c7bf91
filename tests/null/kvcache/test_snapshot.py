"""Tests snapshots: a file is read back unchanged, or refused in one line if it was damaged or forged."""

import os
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.quick import examples

from staticllm.core import Variant
from staticllm.errors import SnapshotError
from staticllm.kvcache.snapshot import MAGIC, load, save
from staticllm.kvcache.stored import StoredSequence
from staticllm.testing import VOCAB_SIZE, fake_runner

IDENTITY = {"model": "fake", "KV type": "f32"}
COUNT = 12


@pytest.fixture(scope="module")
def cache():
    return fake_runner([Variant(16, 0), Variant(1, 64)], is_recurrent=True).cache


@pytest.fixture(scope="module")
def stored(cache):
    rng = np.random.default_rng(0)
    kv = tuple(rng.random(shape, np.float32).astype(dtype) for shape, dtype in cache.layout.kv_shapes(COUNT))
    states = tuple(np.full(shape, 7, dtype) for shape, dtype in cache.layout.states)
    return StoredSequence(tuple(range(5, 5 + COUNT)), kv, states)


def read(path, cache, key=b"", most=64, identity=IDENTITY):
    return load(path, identity, cache.layout, most, key)


def refused(path, cache, **options):
    with pytest.raises(SnapshotError) as error:
        read(path, cache, **options)
    text = str(error.value)
    assert "\n" not in text
    assert path.name in text
    return text


def test_a_saved_snapshot_is_read_back_unchanged(tmp_path, cache, stored):
    for key in (b"", b"0123456789abcdef"):
        save(stored, tmp_path / "snapshot", IDENTITY, key)
        found = read(tmp_path / "snapshot", cache, key)
        assert found.tokens == stored.tokens
        assert cache.layout.fits(found)
        for mine, theirs in zip((*found.kv, *found.states), (*stored.kv, *stored.states), strict=True):
            assert np.array_equal(mine, theirs)
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot"]


def test_a_flipped_bit_or_another_length_is_refused(tmp_path, cache, stored):
    path = tmp_path / "snapshot"
    save(stored, path, IDENTITY)
    whole = path.read_bytes()
    for place in range(len(whole)):
        broken = bytearray(whole)
        broken[place] ^= 1 << place % 8
        path.write_bytes(broken)
        refused(path, cache)
    for length in (*range(0, len(whole), 7), len(whole) - 1):
        path.write_bytes(whole[:length])
        refused(path, cache)
    path.write_bytes(whole + b"\0")
    assert "has" in refused(path, cache)


@settings(
    max_examples=examples(300),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.binary(max_size=300), st.booleans())
def test_arbitrary_bytes_are_refused(tmp_path, cache, data, is_framed):
    path = tmp_path / "snapshot"
    path.write_bytes(MAGIC + data if is_framed else data)
    refused(path, cache)


def test_wrong_contents_with_a_valid_digest_are_refused(tmp_path, cache, stored):
    """A forger can compute the digest, so shapes and numbers are checked as well."""
    path = tmp_path / "snapshot"
    narrow = tuple(array[..., :1] for array in stored.kv)
    for wrong, words in [
        (replace(stored, kv=narrow), "bytes of keys and values"),
        (replace(stored, kv=stored.kv[:-1]), "bytes of keys and values"),
        (replace(stored, states=()), "bytes of keys and values"),
        (replace(stored, tokens=tuple(range(COUNT + 1))), "bytes of keys and values"),
        (replace(stored, tokens=()), "0 tokens"),
        (replace(stored, tokens=(*range(COUNT - 1), VOCAB_SIZE)), "beyond the vocabulary"),
        (replace(stored, tokens=(*range(COUNT - 1), -1)), "beyond the vocabulary"),
        (replace(stored, kv=tuple(np.where(array == array.max(), np.nan, array) for array in stored.kv)), "not finite"),
        (replace(stored, kv=tuple(np.full_like(array, np.inf) for array in stored.kv)), "not finite"),
    ]:
        save(wrong, path, IDENTITY)
        assert words in refused(path, cache), words


def test_the_error_names_the_difference(tmp_path, cache, stored):
    path = tmp_path / "snapshot"
    save(stored, path, {**IDENTITY, "KV type": "bf16"})
    assert "is of another KV type (bf16, here f32)" in refused(path, cache)
    save(stored, path, IDENTITY)
    assert "HOST_KV_SLOTS is 11" in refused(path, cache, most=COUNT - 1)


def test_a_snapshot_with_another_key_is_refused(tmp_path, cache, stored):
    path = tmp_path / "snapshot"
    save(stored, path, IDENTITY)
    assert "was saved without a key" in refused(path, cache, key=b"k" * 16)
    save(stored, path, IDENTITY, b"k" * 16)
    assert "was saved with a key" in refused(path, cache)
    assert "another INTEGRITY_KEY" in refused(path, cache, key=b"j" * 16)


def test_a_path_that_is_not_an_ordinary_file_is_refused(tmp_path, cache):
    assert "is not there" in refused(tmp_path / "nothing", cache)
    assert refused(tmp_path, cache)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        found = []
        thread = threading.Thread(target=lambda: found.append(refused(tmp_path / "pipe", cache)), daemon=True)
        thread.start()
        thread.join(10)
        assert "not an ordinary file" in found[0]


def test_an_unwritable_path_is_an_error(tmp_path, stored):
    with pytest.raises(SnapshotError, match="cannot be written"):
        save(stored, tmp_path / "no" / "snapshot", IDENTITY)


def test_a_file_of_an_earlier_version_is_named_in_the_error(cache, tmp_path):
    path = tmp_path / "old"
    path.write_bytes(b"staticllm rows 2\n" + bytes(200))
    assert "was written by an earlier version: save it again" in refused(path, cache)


@pytest.mark.skipif(os.name == "nt", reason="links and pipes are others there")
def test_save_follows_links_and_refuses_folders(stored, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    save(stored, tmp_path / "link", IDENTITY)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").is_file()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, "/", "", "a\0b"):
        with pytest.raises(SnapshotError, match=r"is not a file|cannot be written"):
            save(stored, path, IDENTITY)
    assert (tmp_path / "pipe").is_fifo()
