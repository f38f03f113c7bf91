"""Tests what ``scripts/check.py`` reads anew: a copy that follows the checkout, and the files that a branch changed."""

from __future__ import annotations

import os
import random
import shutil
import subprocess

import pytest


@pytest.fixture
def check(root, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "scripts"))
    import check

    return check


@pytest.fixture
def git(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("git is not installed")

    def call(*arguments):
        given = ["git", "-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false", *arguments]
        subprocess.run(given, cwd=tmp_path, check=True, capture_output=True)

    call("init", "--quiet", "--initial-branch=main")
    return call


def contents(folder):
    return {path.relative_to(folder): path.read_text("utf-8") for path in folder.rglob("*.py")}


def test_the_copy_follows_a_checkout_that_changes(check, tmp_path):
    drawn = random.Random(3)
    source, copy, fresh = (tmp_path / name for name in ("source", "copy", "fresh"))
    folders = [*check.FOLDERS, "staticllm/cli", "kvcache/pages", "scripts", "scripts/papers", "examples"]
    for round_ in range(12):
        for _ in range(4):
            path = source / drawn.choice(folders) / f"{drawn.choice('abc')}.py"
            if path.is_file() and drawn.random() < 0.4:
                path.unlink()
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f"x = {round_}{drawn.random()}\n", "utf-8")
        check.mirror(source, copy)
        check.mirror(source, fresh / str(round_))
        assert contents(copy) == contents(fresh / str(round_)), round_
    assert len(contents(copy)) == len(contents(source)) > 5


def test_a_file_that_did_not_change_is_not_copied_again(check, tmp_path):
    source, copy = tmp_path / "source", tmp_path / "copy"
    (source / "kvcache").mkdir(parents=True)
    (source / "kvcache" / "a.py").write_text("a = 1\n", "utf-8")
    check.mirror(source, copy)
    target = copy / "staticllm" / "kvcache" / "a.py"
    before = (source / "kvcache" / "a.py").stat()
    target.write_text("b = 2\n", "utf-8")  # as long as the original
    os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
    check.mirror(source, copy)
    assert target.read_text("utf-8") == "b = 2\n"
    (source / "kvcache" / "a.py").write_text("a = 10\n", "utf-8")
    check.mirror(source, copy)
    assert target.read_text("utf-8") == "a = 10\n"


def test_changed_files_are_those_of_the_branch_and_of_the_working_tree(check, git, tmp_path):
    for name in ("kept.md", "removed.md", "committed.md", "edited.md"):
        (tmp_path / name).write_text("1\n")
    (tmp_path / ".gitignore").write_text("build/\n")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    assert check.changed_files(tmp_path) == []
    git("checkout", "--quiet", "-b", "branch")
    (tmp_path / "committed.md").write_text("2\n")
    git("commit", "--quiet", "-am", "second")
    (tmp_path / "edited.md").write_text("2\n")
    (tmp_path / "new.md").write_text("1\n")
    (tmp_path / "removed.md").unlink()
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "ignored.md").write_text("1\n")
    assert check.changed_files(tmp_path) == ["committed.md", "edited.md", "new.md"]


def test_without_a_main_branch_changed_files_are_those_of_the_working_tree(check, git, tmp_path):
    (tmp_path / "a.md").write_text("1\n")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    git("branch", "-m", "trunk")
    (tmp_path / "a.md").write_text("2\n")
    assert check.changed_files(tmp_path) == ["a.md"]


def test_without_git_no_file_counts_as_changed(check, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "a.md").write_text("1\n")
    assert check.changed_files(tmp_path) == []
