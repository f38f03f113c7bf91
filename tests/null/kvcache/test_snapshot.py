"""Saved rows are files that somebody else may have written: read as they were written, or refused in one line."""

import os
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quick import examples

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
    rows = tuple(rng.random(shape, np.float32).astype(dtype) for shape, dtype in cache.layout.kv_shapes(COUNT))
    states = tuple(np.full(shape, 7, dtype) for shape, dtype in cache.layout.states)
    return StoredSequence(tuple(range(5, 5 + COUNT)), rows, states)


def read(path, cache, key=b"", most=64, identity=IDENTITY):
    return load(path, identity, cache.layout, most, key)


def refused(path, cache, **options):
    with pytest.raises(SnapshotError) as error:
        read(path, cache, **options)
    text = str(error.value)
    assert "\n" not in text and path.name in text
    return text


def test_what_was_saved_is_what_is_read(tmp_path, cache, stored):
    for key in (b"", b"0123456789abcdef"):
        save(stored, tmp_path / "rows", IDENTITY, key)
        found = read(tmp_path / "rows", cache, key)
        assert found.tokens == stored.tokens and cache.layout.fits(found)
        for mine, theirs in zip((*found.kv, *found.states), (*stored.kv, *stored.states), strict=True):
            assert np.array_equal(mine, theirs)
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


def test_every_flipped_bit_and_every_length_is_refused(tmp_path, cache, stored):
    path = tmp_path / "rows"
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


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_refused(tmp_path, cache, data, is_framed):
    path = tmp_path / "rows"
    path.write_bytes(MAGIC + data if is_framed else data)
    refused(path, cache)


def test_right_digests_do_not_make_wrong_rows_right(tmp_path, cache, stored):
    """Whoever can compute a digest can write anything: shapes and numbers are checked too."""
    path = tmp_path / "rows"
    narrow = tuple(rows[..., :1] for rows in stored.kv)
    for wrong, words in [
        (replace(stored, kv=narrow), "bytes of keys and values"),
        (replace(stored, kv=stored.kv[:-1]), "bytes of keys and values"),
        (replace(stored, states=()), "bytes of keys and values"),
        (replace(stored, tokens=tuple(range(COUNT + 1))), "bytes of keys and values"),
        (replace(stored, tokens=()), "0 tokens"),
        (replace(stored, tokens=(*range(COUNT - 1), VOCAB_SIZE)), "beyond the vocabulary"),
        (replace(stored, tokens=(*range(COUNT - 1), -1)), "beyond the vocabulary"),
        (replace(stored, kv=tuple(np.where(rows == rows.max(), np.nan, rows) for rows in stored.kv)), "not finite"),
        (replace(stored, kv=tuple(np.full_like(rows, np.inf) for rows in stored.kv)), "not finite"),
    ]:
        save(wrong, path, IDENTITY)
        assert words in refused(path, cache), words


def test_what_differs_is_named(tmp_path, cache, stored):
    path = tmp_path / "rows"
    save(stored, path, {**IDENTITY, "KV type": "bf16"})
    assert "is of another KV type (bf16, here f32)" in refused(path, cache)
    save(stored, path, IDENTITY)
    assert "HOST_KV_SLOTS is 11" in refused(path, cache, most=COUNT - 1)


def test_a_key_keeps_others_out(tmp_path, cache, stored):
    path = tmp_path / "rows"
    save(stored, path, IDENTITY)
    assert "was saved without a key" in refused(path, cache, key=b"k" * 16)
    save(stored, path, IDENTITY, b"k" * 16)
    assert "was saved with a key" in refused(path, cache)
    assert "another INTEGRITY_KEY" in refused(path, cache, key=b"j" * 16)


def test_what_is_no_ordinary_file_is_refused(tmp_path, cache):
    assert "is not there" in refused(tmp_path / "nothing", cache)
    assert refused(tmp_path, cache)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        found = []
        thread = threading.Thread(target=lambda: found.append(refused(tmp_path / "pipe", cache)), daemon=True)
        thread.start()
        thread.join(10)
        assert "not an ordinary file" in found[0]


def test_a_place_that_cannot_be_written_is_said(tmp_path, stored):
    with pytest.raises(SnapshotError, match="cannot be written"):
        save(stored, tmp_path / "no" / "rows", IDENTITY)


def test_a_file_of_an_earlier_version_is_refused_as_such(cache, tmp_path):
    path = tmp_path / "old"
    path.write_bytes(b"staticllm rows 2\n" + bytes(200))
    assert "was written by an earlier version: save it again" in refused(path, cache)


@pytest.mark.skipif(os.name == "nt", reason="links and pipes are others there")
def test_only_files_are_written(stored, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    save(stored, tmp_path / "link", IDENTITY)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").is_file()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, "/", "", "a\0b"):
        with pytest.raises(SnapshotError, match=r"is not a file|cannot be written"):
            save(stored, path, IDENTITY)
    assert (tmp_path / "pipe").is_fifo()
