"""Every relative link of the documentation leads to a file and a heading, and every page that the repository names exists."""

from __future__ import annotations

import re

import pytest

FOLDERS = ("staticllm", "compiler_passes", "kvcache", "pipelines", "scripts", "tests", "examples", "docs")
NAMES = re.compile(r"\bdocs/[\w/.-]+\.(?:md|png|json)\b")
LINKS = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")


@pytest.fixture(scope="module")
def pages(root):
    """The text of each Markdown page outside of code blocks."""
    found = [
        root / "README.md",
        root / "CHANGELOG.md",
        *(root / "docs").rglob("*.md"),
        *(root / "scripts").rglob("*.md"),
    ]
    return {page: re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S) for page in found}


def anchors(text):
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_relative_link_leads_to_a_file_and_a_heading(root, pages):
    dead = []
    for page, text in pages.items():
        for found in LINKS.findall(re.sub(r"`[^`\n]*`", "", text)):
            target, _, anchor = "".join(found).partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            other = (page.parent / target).resolve() if target else page
            if not other.exists() or (anchor and anchor not in anchors(pages[other])):
                dead.append(f"{page.relative_to(root)}: {''.join(found)}")
    assert not dead


def test_every_page_that_is_named_exists(root):
    files = [
        path
        for folder in FOLDERS
        for path in (root / folder).rglob("*")
        if path.suffix in (".py", ".md", ".js", ".toml")
    ]
    missing = [
        f"{path.relative_to(root)}: {name}"
        for path in (*files, root / "README.md", root / "CHANGELOG.md", root / "pyproject.toml")
        for name in NAMES.findall(path.read_text(encoding="utf-8"))
        if not (root / name).exists()
    ]
    assert not missing


def test_every_page_is_listed(root):
    """A reader finds each page from docs/README.md, and each page of the lab from its own list."""
    for folder in (root / "docs", root / "docs" / "lab"):
        listed = set(re.findall(r"\]\(([\w/.]+)\)", (folder / "README.md").read_text(encoding="utf-8")))
        known = {path.name for path in folder.glob("*.md")} - {"README.md"}
        assert known <= listed, known - listed
    reference = {f"reference/{path.name}" for path in (root / "docs" / "reference").iterdir()}
    assert reference <= set(re.findall(r"\]\(([\w/.]+)\)", (root / "docs" / "README.md").read_text(encoding="utf-8")))


def test_every_module_that_a_page_names_exists(root, pages):
    """A name with a folder may begin at any folder of the repository."""
    known = {path.relative_to(root).as_posix() for folder in FOLDERS for path in (root / folder).rglob("*.py")}
    missing = [
        f"{page.relative_to(root)}: {name}"
        for page, text in pages.items()
        for name in re.findall(r"`((?:[\w-]+/)+[\w-]+\.py)`", text)
        if not any(f"/{path}".endswith(f"/{name}") for path in known)
    ]
    assert not missing
