"""Tests that blob sets are written completely or not at all, and that one process can open a cache several times."""

import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from filelock import Timeout
from support.helpers import a_set

from staticllm import StaticLLMPipeline
from staticllm.compiler_passes.artifacts import blob_set
from staticllm.compiler_passes.artifacts.blob_set import MANIFEST, is_ours, read_manifest, read_stored
from staticllm.compiler_passes.artifacts.cache import BlobCache
from staticllm.system import file_lock
from staticllm.system.file_lock import acquire

pytestmark = pytest.mark.usefixtures("shared_programs")

REPLACE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from support.helpers import a_set
print("begins", flush=True)
count = 0
while True:
    count += 1
    a_set(Path(sys.argv[1]), bytes([count % 250]) * 300_000)
"""


@pytest.mark.slow
def test_a_writer_killed_while_replacing_leaves_a_complete_set(tmp_path, root):
    target, rest = tmp_path / "my.blob", {"manifest.json", ".staticllm.lock"}
    a_set(target)
    moments = iter([0.0, 0.001, 0.003, 0.007, 0.012, 0.02, 0.03, 0.05] * 5)
    kills = 0
    while kills < 12:
        child = subprocess.Popen(
            [sys.executable, "-c", REPLACE, str(target), str(root / "tests")], stdout=subprocess.PIPE, text=True
        )
        child.stdout.readline()
        time.sleep(next(moments))
        child.kill()
        child.communicate()
        kills += 1
        assert next(len(data) for _, data in read_stored(target, read_manifest(target))) in (7, 300_000)
        assert [path.name for path in tmp_path.iterdir()] == ["my.blob"]
    written = a_set(target, b"last")
    assert {path.name for path in target.iterdir()} == rest | set(written.blobs)


def test_a_writer_killed_before_its_first_set_does_not_block_the_next(tmp_path):
    target = tmp_path / "my.blob"
    target.mkdir()
    (target / blob_set.LOCK).touch()
    (target / "0-generate-1x64-aaaaaaaaaaaa.blob").write_bytes(b"half")
    (target / ".staticllm-xyz").write_bytes(b"")
    assert is_ours(target)
    written = a_set(target)
    assert {path.name for path in target.iterdir()} - {blob_set.LOCK} == {MANIFEST, *written.blobs}
    (target / "notes.txt").write_text("mine")
    a_set(target, b"other")
    assert (target / "notes.txt").read_text() == "mine", "what is not ours stays"


def test_prune_removes_the_files_of_a_dead_writer(tmp_path):
    cache = BlobCache(tmp_path)
    for key in ("a" * 24, "b" * 24):
        cache.path(key).mkdir()
        (cache.path(key) / ".staticllm.lock").touch()
        (cache.path(key) / "0.blob").write_bytes(b"half")
    with cache.lease("b" * 24):
        in_use = threading.Thread(target=lambda: cache.prune(1 << 40))
        in_use.start()
        in_use.join()
        assert [entry.key for entry in cache.entries()] == ["b" * 24], "what is being written stays"
    cache.prune(1 << 40)
    assert not cache.entries()


@pytest.mark.parametrize("limit", [0, 1 << 40])
def test_prune_goes_on_past_a_folder_of_another_user(tmp_path, monkeypatch, limit):
    cache = BlobCache(tmp_path)
    foreign, own = cache.path("a" * 24), cache.path("b" * 24)
    foreign.mkdir()
    a_set(own)
    shown = {name: getattr(Path, name) for name in ("stat", "iterdir", "open", "unlink")}

    def refuses(name):
        def call(self, *args, **options):
            if foreign in self.parents or (name == "iterdir" and self == foreign):
                raise PermissionError(13, "Permission denied", str(self))
            return shown[name](self, *args, **options)

        return call

    for name in shown:
        monkeypatch.setattr(Path, name, refuses(name))
    assert [entry.key for entry in cache.prune(limit) if entry.folder == own] == ["b" * 24] * (limit == 0)
    assert own.exists() == bool(limit)


def test_a_failure_while_replacing_keeps_the_previous_set(tmp_path, monkeypatch):
    a_set(tmp_path / "set", b"first")
    write, calls = blob_set._write, []

    def failing(path, data):
        calls.append(path)
        if path.name == MANIFEST:
            raise PermissionError(13, "Permission denied")
        write(path, data)

    monkeypatch.setattr(blob_set, "_write", failing)
    with pytest.raises(PermissionError):
        a_set(tmp_path / "set", b"second")
    monkeypatch.undo()
    assert [data for _, data in read_stored(tmp_path / "set", read_manifest(tmp_path / "set"))] == [b"first"]
    assert len(calls) == 2
    assert len({path.name for path in (tmp_path / "set").iterdir()} - {blob_set.LOCK}) == 2


def test_a_reader_whose_set_is_replaced_reads_the_new_one(tmp_path):
    a_set(tmp_path / "set", b"first")
    seen = []

    def use(manifest):
        if not seen:
            seen.append(True)
            a_set(tmp_path / "set", b"second")
        return [data for _, data in read_stored(tmp_path / "set", manifest)]

    assert blob_set.read_steadily(tmp_path / "set", use) == [b"second"]


# -- one process, one cache, several pipelines

STAGED = {
    "PROGRAMS": "separate",
    "BACKGROUND_COMPILE": True,
    "MAX_PROMPT_LEN": 32,
    "MIN_RESPONSE_LEN": 16,
    "MAX_NUM_SEQS": 2,
}


def test_one_thread_can_load_the_same_model_twice(zoo, tmp_path):
    with (
        StaticLLMPipeline(zoo / "llama", **STAGED, CACHE_DIR=tmp_path) as first,
        StaticLLMPipeline(zoo / "llama", **STAGED, CACHE_DIR=tmp_path) as second,
    ):
        assert first.wait_until_complete(60), "the first was not complete after 60 s"
        assert second.is_complete, "the second did not load the set of the first"
        assert len(second.generate("hello", max_new_tokens=2, ignore_eos=True).tokens[0]) == 2


@pytest.mark.slow
def test_a_load_can_be_repeated_in_an_except_block(zoo, tmp_path):
    def fails(event):
        if event.stage == "warm-up":
            raise ZeroDivisionError("the user's own")

    try:
        StaticLLMPipeline(zoo / "llama", **STAGED, CACHE_DIR=tmp_path, on_progress=fails)
    except ZeroDivisionError:
        with StaticLLMPipeline(zoo / "llama", **STAGED, CACHE_DIR=tmp_path) as pipe:
            assert pipe.wait_until_complete(60)
    assert len(BlobCache(tmp_path).entries()) == 1


def test_a_load_inside_its_own_callback_does_not_deadlock(zoo, tmp_path):
    """The inner load would wait for itself, so it runs without the cache and warns."""
    inner = []

    def nested(event):
        if event.stage == "read" and not inner:
            inner.append(
                StaticLLMPipeline(
                    zoo / "llama", MAX_PROMPT_LEN=32, MIN_RESPONSE_LEN=16, PROGRAMS="shared", CACHE_DIR=tmp_path
                )
            )

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = StaticLLMPipeline(
            zoo / "llama",
            MAX_PROMPT_LEN=32,
            MIN_RESPONSE_LEN=16,
            PROGRAMS="shared",
            CACHE_DIR=tmp_path,
            on_progress=nested,
        )
    assert any("already loading the same model" in str(warning.message) for warning in caught)
    for each in (pipe, *inner):
        assert each.generate("hello", max_new_tokens=1)
        each.close()


def test_a_callback_that_aborts_the_load_leaves_no_lock(zoo, tmp_path):
    def fails(event):
        if event.stage == "ready":
            raise ZeroDivisionError("the user's own")

    with pytest.raises(ZeroDivisionError):
        StaticLLMPipeline(zoo / "llama", **STAGED, CACHE_DIR=tmp_path, on_progress=fails)
    done = []
    thread = threading.Thread(
        target=lambda: done.append(StaticLLMPipeline(zoo / "llama", **STAGED, CACHE_DIR=tmp_path)), daemon=True
    )
    thread.start()
    thread.join(60)
    assert done, "the next load waits for a lock that is never released"
    done[0].close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_locks_of_its_parents_threads(tmp_path):
    with acquire(tmp_path / "lock"):
        child = os.fork()
        if not child:
            try:
                with acquire(tmp_path / "other"):
                    acquire(tmp_path / "lock", 0.1)
            except Timeout:
                os._exit(3)  # the parent holds the lock, as another process might
            os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    with acquire(tmp_path / "lock"):
        child = os.fork()
        if not child:
            file_lock._holders_lock.acquire(timeout=1)
            os._exit(5 if file_lock._holders else 6)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6


def test_files_of_others_are_not_touched(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "manifest.json").write_text('{"name": "my web app"}')
    (site / "12345678.blob").write_bytes(b"mine")
    assert not is_ours(site)
    assert not is_ours(tmp_path / "nothing")
    a_set(tmp_path / "set", b"first")
    (tmp_path / "set" / "98765.blob").write_bytes(b"OpenVINO's own cache")
    a_set(tmp_path / "set", b"second")
    assert (tmp_path / "set" / "98765.blob").exists()
    assert is_ours(tmp_path / "set")


def test_a_failed_writer_leaves_the_folder_of_another_writer_alone(tmp_path, monkeypatch):
    write, gate, results = blob_set._write, threading.Event(), []

    def slow(path, data):
        if threading.current_thread().name == "failing":
            gate.wait(10)
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(blob_set, "_write", slow)

    def run():
        try:
            results.append(a_set(tmp_path / "set"))
        except OSError as error:
            results.append(error)

    threads = [threading.Thread(target=run, name=name) for name in ("failing", "working")]
    for thread in threads:
        thread.start()
        time.sleep(0.2)
    gate.set()
    for thread in threads:
        thread.join(30)
    assert sum(isinstance(result, OSError) for result in results) == 1
    assert read_manifest(tmp_path / "set").blobs
