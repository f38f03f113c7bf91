"""Tests the snippets of docs/embeddings.md and the example that searches a folder, each in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from encoder_models import encoder_directory, unpack

SNIPPETS = [
    ("numpy", r"An NPU is a neural processing unit\.\n"),
    ("numpy", r"\(200, 16\) \(200, 4\) int8\n5 vectors of handles\n"),
    ("numpy", r"(0\.\d\d (a fox is an animal|the sun is hot|the moon is not)\n){2}"),
    ("numpy", r"\(32,\) \(2, 32\)\n"),
    ("langchain_core", r"Rain is water that falls from clouds\.\n"),
    ("llama_index", r"Rain is water that falls from clouds\.\n"),
]
"""What each snippet needs, and what it prints."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("page")
    (place / "my_encoder").mkdir()
    encoder_directory(place / "my_encoder")
    (place / "my_reranker").mkdir()
    for name in ("bert_scores", "bert_tokenizer"):
        unpack(name, place / "my_reranker")
    return place


def snippets(root):
    return re.findall(r"```python\n(.*?)```", (root / "docs" / "embeddings.md").read_text(encoding="utf-8"), re.S)


def needs(module, extra):
    """Skip the test without an optional package; CI has installed all of them."""
    if importlib.util.find_spec(module) is None:
        reason = f"pip install '.[{extra}]'"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)


def run(*command, folder):
    return subprocess.run(
        [sys.executable, *map(str, command)], cwd=folder, capture_output=True, text=True, encoding="utf-8", timeout=180,
        check=False, env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_each_snippet_runs_alone(root, folder, number):
    module, printed = SNIPPETS[number]
    needs(module, "adapters")
    script = folder / f"snippet{number}.py"
    script.write_text(snippets(root)[number], encoding="utf-8")
    done = run(script, folder=folder)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(printed, done.stdout), done.stdout


def test_every_snippet_is_tested(root):
    assert len(snippets(root)) == len(SNIPPETS)


@pytest.fixture
def search(root, folder):
    needs("faiss", "examples")
    return lambda *arguments: run(root / "examples" / "search_folder.py", *arguments, folder=folder)


def test_a_folder_is_searched(search, tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "one.md").write_text(
        "# Rain\n\nRain is water that falls\nfrom clouds.\n\n\n", encoding="utf-8"
    )
    (tmp_path / "two.txt").write_text(
        "query: Rain is water that falls\nfrom clouds.\n\nNothing else.", encoding="utf-8"
    )
    (tmp_path / "three.bin").write_text("Rain is water that falls\nfrom clouds.")
    done = search("my_encoder", tmp_path, "Rain is water that falls\nfrom clouds.")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 6
    assert lines[0] == "1.000  two.txt, paragraph 1", "the query has its prompt before it, and this text as well"
    assert lines[1].strip() == "query: Rain is water that falls from clouds."
    assert "deep/one.md, paragraph " in done.stdout
    assert "three.bin" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none", ".", "q"], "no model directory"),
        (["my_encoder", "nothing", "q"], "has no paragraph in a .txt or .md file"),
        (["my_encoder"], "python search_folder.py MODEL_DIR FOLDER QUERY"),
    ],
)
def test_a_mistake_of_the_example_has_no_traceback(search, folder, arguments, said):
    (folder / "a.txt").write_text("text", encoding="utf-8")
    done = search(*arguments)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
