"""Builds a release from the commit that is checked out: an sdist, a wheel, and the notes of the version.

python scripts/release.py          # checks the tree, builds in dist/VERSION, and checks what was built
python scripts/release.py --tag    # makes an annotated tag with the notes as well; pushing it is left to you
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

from _setup import ROOT, ensure_environment, run
from check import FOLDERS, check_size, try_wheel

DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", action="store_true", help="make the annotated tag if all checks pass")
    is_tagged = parser.parse_args().tag
    python = ensure_environment("check", "release")
    version = version_of(ROOT)
    if found := problems(ROOT, version, is_tagged):
        sys.exit("\n".join(found))
    target = ROOT / "dist" / version
    build(python, target)
    notes = target / "notes.md"
    notes.write_text(f"staticllm {version}\n\n{section(changelog_of(ROOT), version).text}", encoding="utf-8")
    print(f"built {', '.join(sorted(path.name for path in target.iterdir()))} in {target.relative_to(ROOT)}")
    if is_tagged:
        tag(ROOT, version, notes)
        print(f"made the tag v{version}; to publish it: git push origin v{version}")


def problems(root: Path, version: str, is_tagged: bool) -> list[str]:
    """Return what stands against a release of this commit, a line each."""
    found = []
    in_code = re.search(r'__version__ = "(.+)"', (root / "staticllm" / "version.py").read_text("utf-8"))
    if in_code is None or in_code[1] != version:
        found.append(f"staticllm/version.py has another version than pyproject.toml, {version}: give both the same")
    changed = git(root, "status", "--porcelain").splitlines()
    if changed:
        found.append(f"{len(changed)} files are not committed, {changed[0][3:]} first: a release is made from a commit")
    try:
        when = section(changelog_of(root), version).when
    except LookupError as error:
        return [*found, str(error)]
    if is_tagged and not DATE.fullmatch(when):
        found.append(
            f"CHANGELOG.md says ({when}) of {version}: write the date there, such as (2026-01-31), and commit it"
        )
    if is_tagged and git(root, "tag", "--list", f"v{version}"):
        found.append(f"the tag v{version} exists already: raise the version in pyproject.toml and staticllm/version.py")
    return found


@dataclass(frozen=True)
class Section:
    """What a changelog says about a version."""

    when: str
    """The words in brackets after the version: a date, or that it is not released."""
    text: str


def section(changelog: str, version: str) -> Section:
    """Return the section of a version. Raises ``LookupError`` if there is none, or nothing in it."""
    parts = re.split(r"(?m)^## (.+)\n", changelog)
    for heading, text in zip(parts[1::2], parts[2::2], strict=True):
        name, _, rest = heading.partition(" ")
        if name == version and text.strip():
            return Section(rest.strip().strip("()"), text.strip() + "\n")
        if name == version:
            raise LookupError(f"the section of {version} in CHANGELOG.md is empty: say what changed for users")
    raise LookupError(f"CHANGELOG.md has no section ## {version} (date): add it, and say what changed for users")


def build(python: Path, target: Path) -> None:
    """Build the sdist and from it the wheel, in a clean copy of the commit. They reach ``target`` if they pass all checks."""
    with tempfile.TemporaryDirectory() as scratch:
        copy, built = Path(scratch) / "commit", Path(scratch) / "dist"
        export(ROOT, copy)
        run(python, "-m", "build", "--outdir", built, copy)  # the wheel of what the sdist holds
        (wheel,) = built.glob("*.whl")
        (sdist,) = built.glob("*.tar.gz")
        if found := differences(wheel, tracked(ROOT)):
            sys.exit("\n".join(found))
        run(python, "-m", "twine", "check", "--strict", wheel, sdist)
        check_size(wheel)
        try_wheel(wheel)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(built, target)


def export(root: Path, target: Path) -> None:
    """Write the files of the commit that is checked out, without what a working tree holds beside them."""
    with tempfile.TemporaryDirectory() as scratch:
        archive = Path(scratch) / "commit.zip"
        git(root, "archive", "--format=zip", f"--output={archive}", "HEAD")
        with zipfile.ZipFile(archive) as files:
            files.extractall(target)


def tracked(root: Path) -> set[str]:
    """Return the files of the commit that an installation has, by their names in the wheel."""
    found = set()
    for folder, place in FOLDERS.items():
        inside = "/".join(filter(None, ("staticllm", place)))
        names = git(root, "ls-tree", "-r", "-z", "--name-only", "HEAD", f"{folder}/").split("\0")
        found |= {inside + name.removeprefix(folder) for name in names if name}
    return found


def differences(wheel: Path, expected: set[str]) -> list[str]:
    """Return what a wheel lacks and what it should not have, a line each."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    lacking = [f"the wheel lacks {name}: see packages and package-data in pyproject.toml" for name in expected - names]
    return sorted(lacking) + sorted(f"the wheel has {name}, which no commit holds" for name in names - expected)


def tag(root: Path, version: str, notes: Path) -> None:
    """Make the annotated tag of a version with the notes, of which git would leave out headings as comments."""
    git(root, "tag", "--annotate", "--cleanup=verbatim", f"--file={notes}", f"v{version}")


def version_of(root: Path) -> str:
    return str(tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["version"])


def changelog_of(root: Path) -> str:
    return (root / "CHANGELOG.md").read_text("utf-8")


def git(root: Path, *arguments: str) -> str:
    """Run git and return what it prints; exit with its words if it fails."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, encoding="utf-8", check=False)
    if done.returncode:
        sys.exit(f"git {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    main()
