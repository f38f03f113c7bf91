"""A cache that this user cannot write, such as one in an image of a container, is read; nothing in it is changed."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from support.encoders.encoder_directories import TEXTS, a_directory
from support.helpers import SHORT, tokens_of

from staticllm import StaticEmbeddingPipeline, StaticLLMPipeline, demo_model_path
from staticllm.compiler_passes.artifacts.cache import BlobCache
from tests.support.inside import launched_of


def a_pipeline(folder):
    return StaticLLMPipeline(demo_model_path(), "CPU", CACHE_DIR=folder, PROGRAMS="shared", **SHORT)


def files_of(folder):
    """Return the files but the measured costs, which root may write anywhere."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != "costs.json"]
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


@pytest.fixture
def no_writing(monkeypatch):
    def refuse(self, key, timeout=-1):
        raise PermissionError(13, "Permission denied")

    return lambda: monkeypatch.setattr(BlobCache, "lease", refuse)


def test_a_set_in_a_folder_that_cannot_be_written_is_used(tmp_path, no_writing):
    with a_pipeline(tmp_path) as pipe:
        expected = tokens_of(pipe)
    before = files_of(tmp_path)
    no_writing()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with a_pipeline(tmp_path) as pipe:
            assert launched_of(pipe).loaded.programs_from == "cache"
            assert tokens_of(pipe) == expected
    assert files_of(tmp_path) == before


def test_an_encoder_in_a_folder_that_cannot_be_written_is_used(tmp_path, no_writing, monkeypatch):
    model, cache = tmp_path / "model", tmp_path / "cache"
    model.mkdir()
    a_directory(model)
    with StaticEmbeddingPipeline(model, "CPU", CACHE_DIR=cache) as pipe:
        expected = pipe.encode(TEXTS)
    no_writing()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with StaticEmbeddingPipeline(model, "CPU", CACHE_DIR=cache) as pipe:
            assert (pipe.encode(TEXTS) == expected).all()


@pytest.mark.parametrize("damage", ["none there", "a blob", "the manifest"])
def test_without_a_set_that_can_be_read_the_programs_are_compiled(tmp_path, no_writing, damage):
    with a_pipeline(tmp_path) as pipe:
        expected = tokens_of(pipe)
    for path in [*tmp_path.rglob("*.blob" if damage == "a blob" else "manifest.json")]:
        path.unlink() if damage == "none there" else path.write_bytes(path.read_bytes()[:-9])
    no_writing()
    before = files_of(tmp_path)
    with pytest.warns(RuntimeWarning, match="CACHE_DIR=.* cannot be used: Permission denied") as warned:
        pipe = a_pipeline(tmp_path)
    assert len([each for each in warned if "CACHE_DIR" in str(each.message)]) == 1
    with pipe:
        assert tokens_of(pipe) == expected
    assert files_of(tmp_path) == before


def child(folder):
    """Load twice: as root, so that all modules are read, then as nobody from a folder that only root can write."""
    with a_pipeline(folder):
        pass
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with a_pipeline(folder) as pipe:
            assert launched_of(pipe).loaded.programs_from == "cache"
            tokens_of(pipe)
    print("as nobody")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="becomes another user")
def test_another_user_reads_the_cache_of_root():
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        command = [sys.executable, str(Path(__file__)), folder]
        paths = os.pathsep.join(str(Path(__file__).parents[level]) for level in (2, 3))
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False, timeout=240
        )
        assert "as nobody" in done.stdout, done.stderr[-2000:]


if __name__ == "__main__":
    child(sys.argv[1])
