"""Tests how ``scripts/docs_site.py`` makes pages of a site out of those of docs/. ``scripts/check.py`` builds the site itself."""

from __future__ import annotations

import pytest

CONTENTS = """# Contents

For users:

| page | what |
|---|---|
| [start](start.md) | install |
| [errors](errors.md), [start](start.md#again) | one [table](lab/figures.md) |

Reference: [API](reference/api.md), [command line](reference/cli.md), [feed](reference/feed.json).

For contributors: [structure](structure.md). [The lab](lab/README.md) has
all measurements.
"""


@pytest.fixture
def site(root, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "scripts"))
    import docs_site

    return docs_site


def test_the_lists_are_those_of_the_contents_page(site):
    assert site.navigation(CONTENTS, ["figures.md", "README.md", "daemon.md"]) == [
        "README.md",
        {"For users": ["start.md", "errors.md"]},
        {"Reference": ["reference/cli.md"]},
        {"For contributors": ["structure.md"]},
        {"The lab": ["lab/README.md", "lab/daemon.md", "lab/figures.md"]},
    ]


def test_the_contents_page_has_all_pages(site, root):
    """As the strict build has it, here without mkdocs: a page that no list names is never found by a reader."""
    docs = root / "docs"
    lab = sorted(path.name for path in (docs / "lab").glob("*.md"))
    nav = site.navigation((docs / "README.md").read_text("utf-8"), lab)
    listed = {
        page for part in nav for pages in (part.values() if isinstance(part, dict) else [[part]]) for page in pages
    }
    assert listed == {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} - {"reference/api.md"}


def test_headings_of_an_entry_rise_and_its_code_stays(site):
    code = "```python\n## a comment\nName(\n    a,\n)\n```"
    entry = f"## Name\n\n{code}\n\nText # 1.\n\n### Name.method\n\n```python\nmethod()\n```\n\n### b"
    expected = f"# Name\n\n{code}\n\nText # 1.\n\n## Name.method\n\n```python\nmethod()\n```\n\n## b"
    assert site.raised(entry) == expected


def test_marks_of_generators_are_left_out_and_what_they_generate_stays(site):
    page = "a\n<!-- [[[cog\nimport cog\n]]] -->\n| b |\n<!-- [[[end]]] -->\nc\n<!-- [[[cog\n]]] -->\nd\n<!-- [[[end]]] -->\n"
    assert site.GENERATED.sub("", page) == "a\n| b |\nc\nd\n"
    assert site.before_generated(page) == "a\n"


def test_a_name_is_a_row_with_a_link(site):
    assert site.api_index({"A": "One.", "B": "a | b"}).splitlines()[2:] == [
        "| [A](api/A.md) | One. |",
        "| [B](api/B.md) | a \\| b |",
    ]
