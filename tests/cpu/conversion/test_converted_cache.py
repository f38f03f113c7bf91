"""Tests the cache of converted GGUF files: an entry is always that of the file's content, and heals."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino as ov
import psutil
import pytest
from support.models.gguf_random import write_random

from staticllm.errors import ModelError
from staticllm.model_files import converted as module
from staticllm.model_files.converted import converted
from staticllm.wire.file_stamp import stamp_of
from tests.cpu.conversion.test_gguf import logits_of

TOKENS = np.random.default_rng(5).integers(0, 500, 10).tolist()
HOLDS = """
import ctypes, pathlib
from staticllm.children.answers import answer_all
from staticllm.system.posix import end_with_parent
from staticllm.system.file_lock import acquire
def answer(body):
    with acquire(pathlib.Path(body["lock"])):
        pathlib.Path(body["target"], "begun").touch()
        {wait}
def main():
    end_with_parent()
    answer_all(answer, None)
"""
CONVERTS = "import sys; sys.path.insert(0, sys.argv[2]); from staticllm.model_files import converted as module; import pathlib; "


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "staticllm" / "converted"


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    """Two files of one size with other weights."""
    path = write_random(tmp_path_factory.mktemp("files") / "model.gguf", "qwen3", layers=1, is_tied=True)
    first = path.read_bytes()
    second = bytearray(first)
    second[-4000:] = np.random.default_rng(1).normal(0, 1, 1000).astype(np.float32).tobytes()
    return first, bytes(second)


@pytest.fixture
def runs(monkeypatch):
    """The files that were converted, one entry per run of the child."""
    found = []
    run = module.run_child
    monkeypatch.setattr(module, "run_child", lambda path, *others: (found.append(path), run(path, *others)))
    return found


def weights_of(folder):
    return (folder / "openvino_model.bin").read_bytes()


def set_back(path, stat):
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def rewrite(path, data, stat):
    path.write_bytes(data)
    set_back(path, stat)


def replace_with_times(path, data, stat):
    other = path.with_name("other.gguf")
    rewrite(other, data, stat)
    shutil.copy2(other, path)


def rename_over(path, data, stat):
    other = path.with_name("other.gguf")
    rewrite(other, data, stat)
    other.replace(path)


@pytest.mark.parametrize("change", [rewrite, replace_with_times, rename_over])
def test_a_file_whose_time_is_set_back_is_another_one(change, contents, tmp_path, runs):
    path = tmp_path / "model.gguf"
    path.write_bytes(contents[0])
    stat = path.stat()
    first = converted(path)
    change(path, contents[1], stat)
    assert (path.stat().st_mtime_ns, path.stat().st_size) == (stat.st_mtime_ns, stat.st_size)
    second = converted(path)
    assert weights_of(first) != weights_of(second)
    change(path, contents[0], stat)
    assert converted(path) == first  # by its content: it is not converted again
    assert len(runs) == 2


def test_a_change_within_a_step_of_the_clock_is_noticed(contents, tmp_path, monkeypatch):
    """Where times move in steps, both contents have the same stamp."""
    path = tmp_path / "model.gguf"
    path.write_bytes(contents[0])
    stamp = stamp_of(path)
    monkeypatch.setattr(module, "stamp_of", lambda given: stamp if given == path else stamp_of(given))
    first = converted(path)
    os.utime(next(first.parent.glob("*.digest")), ns=(stamp[2], stamp[2] + module.STEP_NS // 2))
    path.write_bytes(contents[1])
    assert converted(path) != first


def test_a_settled_file_is_not_read_again(contents, tmp_path, monkeypatch, runs):
    path = tmp_path / "model.gguf"
    path.write_bytes(contents[0])
    folder = converted(path)
    later = stamp_of(path)[2] + 2 * module.STEP_NS
    os.utime(next(folder.parent.glob("*.digest")), ns=(later, later))
    monkeypatch.setattr(module, "file_digest", None)
    assert converted(path) == folder
    assert len(runs) == 1


@pytest.mark.parametrize("is_undone", [False, True])
def test_a_file_that_is_rewritten_before_the_child_reads_it_is_not_kept(
    is_undone, contents, tmp_path, cache, monkeypatch
):
    """The time is set back, and even the content may be there again after the conversion."""
    path = tmp_path / "model.gguf"
    path.write_bytes(contents[0])
    stat = path.stat()
    run = module.run_child

    def rewritten(path, *others):
        rewrite(path, contents[1], stat)
        run(path, *others)
        if is_undone:
            rewrite(path, contents[0], stat)

    with monkeypatch.context() as patch:
        patch.setattr(module, "run_child", rewritten)
        with pytest.raises(ModelError, match="was changed while it was converted: wait until it is complete"):
            converted(path)
    assert not [each for each in cache.iterdir() if each.is_dir()]
    rewrite(path, contents[0], stat)
    first = converted(path)
    other = tmp_path / "other.gguf"
    other.write_bytes(contents[1])
    assert weights_of(converted(other)) != weights_of(first)


def test_a_file_without_stamps_of_changes_that_is_rewritten_is_not_kept(contents, tmp_path, cache, monkeypatch):
    """As on file systems that have no time of changes: the digest is taken again."""
    path = tmp_path / "model.gguf"
    path.write_bytes(contents[0])
    stamp = stamp_of(path)
    run = module.run_child
    monkeypatch.setattr(module, "stamp_of", lambda given: stamp if given == path else stamp_of(given))
    monkeypatch.setattr(module, "run_child", lambda path, *others: (path.write_bytes(contents[1]), run(path, *others)))
    with pytest.raises(ModelError, match="was changed while it was converted"):
        converted(path)
    assert not [each for each in cache.iterdir() if each.is_dir()]


def flip(path, random):
    data = bytearray(path.read_bytes())
    data[random.integers(len(data))] ^= 1 << random.integers(8)
    stat = path.stat()
    rewrite(path, data, stat)


def test_an_entry_with_a_flipped_byte_is_made_again(contents, tmp_path, runs, in_full):
    """Whichever file it is in, with the time set back; also an entry without the file."""
    path = tmp_path / "model.gguf"
    path.write_bytes(contents[0])
    folder = converted(path)
    names = sorted(each.name for each in folder.iterdir() if each.name != module.FILES)
    expected = logits_of(ov.Core().read_model(folder / "openvino_model.xml"), TOKENS, ())
    random = np.random.default_rng(4)
    for name in (*names, module.FILES) if in_full else ("openvino_model.xml", "openvino_model.bin", module.FILES):
        for damage in (flip, lambda each, _: each.unlink()):
            before = len(runs)
            good = (folder / name).read_bytes()
            damage(folder / name, random)
            assert converted(path) == folder
            assert len(runs) == before + 1 or name == module.FILES  # a flipped stamp is written anew
            assert name in (module.FILES, "openvino_model.xml") or (folder / name).read_bytes() == good
            found = logits_of(ov.Core().read_model(folder / "openvino_model.xml"), TOKENS, ())
            assert np.array_equal(found, expected)


def test_an_entry_that_was_copied_is_compared_once_and_not_converted(contents, tmp_path, runs, monkeypatch):
    path = tmp_path / "model.gguf"
    path.write_bytes(contents[0])
    folder = converted(path)
    shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    shutil.rmtree(folder)
    (tmp_path / "copy").rename(folder)
    assert converted(path) == folder
    known = json.loads((folder / module.FILES).read_text())
    assert all(known[name][1:] == list(stamp_of(folder / name)) for name in known)
    assert len(runs) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="permissions of POSIX")
def test_a_cache_that_cannot_be_written_is_used_if_it_has_the_model(contents, tmp_path, cache):
    """Also without the note, as in an image of a container. Root may write everywhere, so another user reads."""
    folder = Path(subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip())
    try:
        path = folder / "model.gguf"
        path.write_bytes(contents[0])
        made = converted(path)
        shutil.copytree(cache.parent.parent, folder / "cache")
        note = next((folder / "cache" / "staticllm" / "converted").glob("*.digest"))
        new = folder / "new.gguf"
        new.write_bytes(contents[1])
        for is_noted in (True, False):
            note.chmod(0o644)
            (folder / "cache" / "staticllm" / "converted").chmod(0o755)
            if not is_noted:
                note.unlink()
            for each in (folder, *folder.rglob("*")):
                each.chmod(0o555 if each.is_dir() else 0o444)
            found = read_as_another_user(folder, path)
            assert found.stdout.strip() == str(folder / "cache" / "staticllm" / "converted" / made.name), found.stderr
            assert not list(made.parent.glob(".unfinished-*"))
            (folder / "cache" / "staticllm" / "converted").chmod(0o755)
            note.touch()
        for each in (folder, *folder.rglob("*")):
            each.chmod(0o555 if each.is_dir() else 0o444)
        refused = read_as_another_user(folder, new)
        assert "ModelError: no model can be kept in" in refused.stderr.splitlines()[-1]
    finally:
        for each in (folder, *folder.rglob("*")):
            each.chmod(0o755)
        shutil.rmtree(folder)


def read_as_another_user(folder, path):
    code = (
        CONVERTS
        + "import os; module.converter(); os.geteuid() or os.seteuid(65534); print(module.converted(pathlib.Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(path), str(folder)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "HOME": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)


WAITS = {
    "sleeps": "import time; time.sleep(600)",
    "holds the interpreter": "ctypes.PyDLL(None).sleep(600)",  # as OpenVINO's reader does for seconds
}


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(
    "wait",
    [
        "sleeps",
        pytest.param(
            "holds the interpreter", marks=pytest.mark.skipif(sys.platform != "linux", reason="Linux ends it")
        ),
    ],
)
def test_the_child_of_a_killed_process_ends_and_leaves_the_lock(wait, contents, tmp_path, cache):
    path = tmp_path / "model.gguf"
    path.write_bytes(contents[0])
    (tmp_path / "holds.py").write_text(HOLDS.format(wait=WAITS[wait]))
    code = CONVERTS + "module.CHILD = 'holds'; module.converted(pathlib.Path(sys.argv[1]))"
    with subprocess.Popen([sys.executable, "-c", code, str(path), str(tmp_path)]) as parent:
        while not list(cache.glob(".unfinished-*/begun")):
            assert parent.poll() is None
        (child,) = psutil.Process(parent.pid).children()
        parent.kill()
    gone, _ = psutil.wait_procs([child], 60)
    assert gone == [child]
    assert (converted(path) / "openvino_model.xml").is_file()
    assert not list(cache.glob(".unfinished-*"))


def test_a_start_waits_for_the_child_of_a_killed_process(contents, tmp_path, cache, monkeypatch):
    """Where the system does not end it at once, it still holds its lock."""
    path = tmp_path / "model.gguf"
    path.write_bytes(contents[0])
    folder = converted(path)
    shutil.rmtree(folder)
    lock = folder.with_name(f"{folder.name}.child.lock")
    order = []
    acquire = module.acquire
    monkeypatch.setattr(module, "acquire", lambda path, seconds: [acquire(path, seconds), order.append(path.name)][0])
    run = module.run_child
    monkeypatch.setattr(module, "run_child", lambda *given: (order.append(given[2].name), run(*given)))
    code = f"import sys; sys.path[:] = {sys.path!r}; from pathlib import Path; from staticllm.system.file_lock import acquire\n"
    code += "with acquire(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read(); print('left', flush=True)"
    command = [sys.executable, "-c", code, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(Exception, match=lock.name):
            acquire(lock, 0.1)
        holder.stdin.close()
        assert converted(path) == folder
    assert order == [f"{folder.name}.lock", lock.name, lock.name]
