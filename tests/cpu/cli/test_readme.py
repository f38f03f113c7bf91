"""Tests that the snippets of README and docs run as they are."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from staticllm import errors

NPU, RAIN = "An NPU is a neural processing unit", "Rain is water that falls from clouds."
PAGES = {
    "README.md": [(NPU, "Hello! How can I help you?"), (RAIN, "Once upon a time")],
    "docs/start.md": [("I am", r"\([4-9]\d tokens were not computed again\)"), (RAIN,)],
    "docs/errors.md": [("106 tokens, 64 fit\n" + RAIN,)],
    "docs/desktop.md": [(NPU,)],
    "docs/testing.md": [
        ("It is sunny.",),
        (r"\['Sunny.', 'I do not'\]", "106 tokens, MAX_PROMPT_LEN is 64"),
        (r"\[5, 5, 5\]",),
    ],
}
"""Pages whose snippets all run by themselves, with regular expressions for their output, in order."""


def snippets(root, page):
    return re.findall(r"```python\n(.*?)```", (root / page).read_text(encoding="utf-8"), re.S)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "number"), [(page, number) for page, printed in PAGES.items() for number in range(len(printed))]
)
def test_each_snippet_runs_alone(root, page, number, tmp_path):
    """The snippet is copied into a file of its own, as a user would do."""
    script = tmp_path / "snippet.py"
    script.write_text(snippets(root, page)[number], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, encoding="utf-8", timeout=120, check=False,
        cwd=tmp_path, env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(".*".join(PAGES[page][number]), done.stdout, re.S), done.stdout


def test_every_snippet_is_tested(root):
    assert {page: len(snippets(root, page)) for page in PAGES} == {
        page: len(printed) for page, printed in PAGES.items()
    }


def test_every_error_has_a_remedy_on_its_page(root):
    page = (root / "docs" / "errors.md").read_text(encoding="utf-8")
    named = {name for line in re.findall(r"^\| `(\w+)` \|", page, re.M) for name in [line]}
    known = {cls.__name__ for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, Exception)}
    assert named == known - {"StaticLLMError"}


def test_the_serving_example_of_the_documentation_runs(root, capsys):
    text = (root / "docs" / "scheduling.md").read_text(encoding="utf-8")
    exec(compile(re.findall(r"```python\n(.*?)```", text, re.S)[0], "scheduling.md", "exec"), {})
    assert "NPU" in capsys.readouterr().out


def test_text_is_on_the_screen_by_line_40(root):
    lines = (root / "README.md").read_text(encoding="utf-8").splitlines()
    assert any("python scripts/demo.py" in line for line in lines[:25])
    assert any("staticllm run" in line for line in lines[:40])
