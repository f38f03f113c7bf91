"""Builds a site of the documentation that can be searched: the pages of docs/, and a page for each public class.

python scripts/docs_site.py                                    # a link that leads nowhere, or a page in no list, is an error
python -m http.server --bind 127.0.0.1 -d build/site/html      # shows it

It is not called site.py, because Python imports a module of that name when it starts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from pathlib import Path

from _setup import ROOT, ensure_environment, run

PLACE = ROOT / "build" / "site"
SECTIONS = ("For users", "Reference", "For contributors")
"""The lists of docs/README.md, which are also those of the site."""
GENERATED = re.compile(r"<!-- \[\[\[cog.*?\]\]\] -->\n?|<!-- \[\[\[end\]\]\] -->\n?", re.DOTALL)
SLUGS = "!!python/object/apply:pymdownx.slugs.slugify {kwds: {case: lower}}"
"""Anchors as GitHub makes them: the pages are written for it."""
CONFIG = """\
site_name: staticllm
docs_dir: pages
site_dir: html
use_directory_urls: false
theme:
  name: material
  font: false
  features: [navigation.sections, navigation.top, search.highlight, content.code.copy]
  palette:
    - {media: "(prefers-color-scheme: light)", scheme: default, toggle: {icon: material/weather-sunny, name: dark}}
    - {media: "(prefers-color-scheme: dark)", scheme: slate, toggle: {icon: material/weather-night, name: light}}
plugins: [search]
markdown_extensions:
  - tables
  - toc: {permalink: true, slugify: SLUGS}
  - pymdownx.highlight
  - pymdownx.superfences
  - pymdownx.magiclink
validation:
  nav: {omitted_files: warn, not_found: warn, absolute_links: warn}
  links: {not_found: warn, anchors: warn, absolute_links: warn, unrecognized_links: warn}
""".replace("SLUGS", SLUGS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)  # in the environment, by this script
    if parser.parse_args().write:
        write_sources(PLACE)
        return
    python = ensure_environment("docs")
    run(python, ROOT / "scripts" / "docs_site.py", "--write")
    os.environ["NO_MKDOCS_2_WARNING"] = "1"  # a banner of the theme about what comes after it
    run(python, "-m", "mkdocs", "build", "--strict", "--config-file", PLACE / "mkdocs.yml")
    print(f"built {PLACE.relative_to(ROOT) / 'html' / 'index.html'}")


def write_sources(place: Path) -> None:
    """Write what mkdocs reads: the pages without cog's marks, a page for each public name, and the configuration."""
    import api_page

    pages = place / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    shutil.copytree(ROOT / "docs", pages)
    entries = api_page.entries()
    summaries = {name: api_page.summary(name) for name in entries}
    for path in pages.rglob("*.md"):
        text = path.read_text("utf-8")
        if path == pages / "reference" / "api.md":
            text = before_generated(text) + api_index(summaries)
        path.write_text(GENERATED.sub("", text), "utf-8")
    (pages / "reference" / "api").mkdir()
    for name, entry in entries.items():
        (pages / "reference" / "api" / f"{name}.md").write_text(raised(entry) + "\n", "utf-8")
    nav = navigation(
        (pages / "README.md").read_text("utf-8"), sorted(path.name for path in (pages / "lab").glob("*.md"))
    )
    nav.insert(-1, {"API": ["reference/api.md", *(f"reference/api/{name}.md" for name in entries)]})
    (place / "mkdocs.yml").write_text(f"{CONFIG}nav: {json.dumps(nav)}\n", "utf-8")


def before_generated(text: str) -> str:
    """Return a page up to what cog writes in it."""
    return text.partition("<!-- [[[cog")[0]


def api_index(summaries: dict[str, str]) -> str:
    """Return a table of public names, each with a link to its page."""
    rows = [f"| [{name}](api/{name}.md) | {text.replace('|', chr(92) + '|')} |" for name, text in summaries.items()]
    return "\n".join(["| name | what it is |", "|---|---|", *rows, ""])


def raised(entry: str) -> str:
    """Return an entry of the API page as a page of its own: its headings one level up, code as it is."""
    parts = re.split(r"(^```.*?^```$)", entry, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else re.sub(r"(?m)^#(#+ )", r"\1", part) for part in parts)


def navigation(contents: str, lab: list[str]) -> list[object]:
    """Return the lists of the contents page as mkdocs has them; the pages of the lab are a list of their own."""
    starts = [contents.index(f"{section}:") for section in SECTIONS]
    nav: list[object] = ["README.md"]
    for section, start, end in zip(SECTIONS, starts, [*starts[1:], len(contents)], strict=True):
        links = dict.fromkeys(re.findall(r"\]\(([\w./-]+\.md)[^)]*\)", contents[start:end]))
        nav.append({section: [link for link in links if link != "reference/api.md" and not link.startswith("lab/")]})
    nav.append({"The lab": [f"lab/{name}" for name in sorted(lab, key=lambda name: (name != "README.md", name))]})
    return nav


if __name__ == "__main__":
    main()
