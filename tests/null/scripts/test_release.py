"""Tests what ``scripts/release.py`` asks of a commit, what it reads of the changelog, and the tag that it makes."""

from __future__ import annotations

import random
import shutil
import subprocess
import zipfile

import pytest

CHANGELOG = """# Changelog

## 0.2.0 (2026-03-01)

Second.

### Notes

- One: `## 0.1.0` is older.

## 0.1.0 (not released)

- First.

## 0.0.9 (2025-01-01)

"""


@pytest.fixture
def release(root, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "scripts"))
    import release

    return release


@pytest.fixture
def git(tmp_path, monkeypatch):
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "a")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "a@localhost")

    def call(*arguments):
        given = ["git", "-c", "commit.gpgsign=false", *arguments]
        return subprocess.run(given, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    call("init", "--quiet")
    call("config", "tag.gpgsign", "false")
    return call


@pytest.fixture
def tree(tmp_path, git):
    """Return a folder with a commit of a version that can be released."""
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / ".gitignore").write_text("build/\n")
    for name in ("staticllm/version.py", "staticllm/page/a.css", "kvcache/arena.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('__version__ = "0.2.0"\n')
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    return tmp_path


def test_the_notes_are_the_section_of_the_version_alone(release):
    assert release.section(CHANGELOG, "0.2.0").text == "Second.\n\n### Notes\n\n- One: `## 0.1.0` is older.\n"
    assert release.section(CHANGELOG, "0.2.0").when == "2026-03-01"
    assert release.section(CHANGELOG, "0.1.0").when == "not released"
    assert release.section(CHANGELOG, "0.1.0").text == "- First.\n"


@pytest.mark.parametrize(("version", "said"), [("0.2", "no section"), ("0.0.9", "empty"), ("2.0", "no section")])
def test_a_version_without_notes_is_no_release(release, version, said):
    with pytest.raises(LookupError, match=said):
        release.section(CHANGELOG, version)


def test_sections_of_random_changelogs_are_found(release):
    drawn = random.Random(5)
    for _ in range(200):
        versions = drawn.sample([f"{a}.{b}.{c}" for a in range(3) for b in range(12) for c in range(3)], 6)
        texts = {version: f"- {drawn.random()}\n\n### {drawn.choice(versions)}\n\n- b" for version in versions}
        page = "# Changelog\n\n" + "\n\n".join(f"## {version} (x)\n\n{text}" for version, text in texts.items())
        assert {version: release.section(page, version).text for version in versions} == {
            version: text + "\n" for version, text in texts.items()
        }


def test_a_clean_commit_with_notes_has_no_problems(release, tree):
    (tree / "build").mkdir()
    (tree / "build" / "ignored").write_text("x")
    assert release.version_of(tree) == "0.2.0"
    assert release.problems(tree, "0.2.0", is_tagged=True) == []


def test_every_problem_has_its_line(release, tree, git):
    git("tag", "v0.1.0")
    (tree / "CHANGELOG.md").write_text(CHANGELOG + "\n")
    (tree / "new file").write_text("x")
    code, files, date, exists = release.problems(tree, "0.1.0", is_tagged=True)
    assert "another version than pyproject.toml, 0.1.0" in code
    assert files.startswith("2 files are not committed, CHANGELOG.md first")
    assert "(not released) of 0.1.0" in date
    assert "v0.1.0 exists already" in exists
    assert release.problems(tree, "0.1.0", is_tagged=False) == [code, files]
    assert "no section" in release.problems(tree, "0.3.0", is_tagged=False)[-1]


def test_the_tag_is_annotated_with_the_notes_and_their_headings(release, tree, git, tmp_path):
    notes = tmp_path / "build" / "notes.md"
    notes.parent.mkdir()
    notes.write_text("staticllm 0.2.0\n\n" + release.section(CHANGELOG, "0.2.0").text, "utf-8")
    release.tag(tree, "0.2.0", notes)
    assert git("cat-file", "-t", "v0.2.0").strip() == "tag"
    assert git("tag", "--list", "--format=%(contents)", "v0.2.0").rstrip() == notes.read_text("utf-8").rstrip()
    with pytest.raises(SystemExit, match=r"git tag failed: .*already exists"):
        release.tag(tree, "0.2.0", notes)


def test_what_is_built_is_what_the_commit_holds(release, tree, tmp_path):
    (tree / "staticllm" / "version.py").write_text("changed")
    (tree / "staticllm" / "stray.py").write_text("new")
    (tree / "build").mkdir()
    release.export(tree, tree / "build" / "copy")
    copied = {path.relative_to(tree / "build" / "copy").as_posix(): path.read_text("utf-8")
              for path in (tree / "build" / "copy").rglob("*") if path.is_file()}  # fmt: skip
    assert copied["staticllm/version.py"] == '__version__ = "0.2.0"\n'
    assert "staticllm/stray.py" not in copied
    assert "kvcache/arena.py" in copied


def test_a_wheel_lacks_nothing_of_the_commit_and_has_nothing_else(release, tree, git):
    (tree / "staticllm" / "ö b.txt").write_text("x")
    for folder in ("pipelines", "compiler_passes"):
        (tree / folder).mkdir()
        (tree / folder / "__init__.py").touch()
    git("add", ".")
    git("commit", "--quiet", "-m", "second")
    expected = release.tracked(tree)
    assert expected == {
        "staticllm/version.py", "staticllm/page/a.css", "staticllm/kvcache/arena.py", "staticllm/ö b.txt",
        "staticllm/pipelines/__init__.py", "staticllm/compiler_passes/__init__.py",
    }  # fmt: skip
    wheel = tree / "build.whl"
    given = expected - {"staticllm/page/a.css"} | {"staticllm/gone.py", "staticllm-0.2.0.dist-info/METADATA"}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in given:
            archive.writestr(name, "")
    lacks, has = release.differences(wheel, expected)
    assert "lacks staticllm/page/a.css" in lacks
    assert "has staticllm/gone.py" in has
