"""Tests the chat with a folder with real weights: over the project's own docs it finds the file that answers a question.

It needs the files of an encoder (`python scripts/real_models.py minilm`), the environment that STATICLLM_EXPORT_PYTHON names, and
the extra ``examples``. The questions were written before anything was measured; they stay as they are.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("STATICLLM_EXPORT_PYTHON")
QUESTIONS = json.loads((Path(__file__).parent / "docs_questions.json").read_text(encoding="utf-8"))
MIN_FOUND = 26
"""28 were found when this was written. The documents are these docs, and change."""
PACKAGES = ("lancedb", "pypdf", "langchain_text_splitters", "openai", "fastapi")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(None in map(importlib.util.find_spec, PACKAGES), reason="pip install '.[server,examples]'"),
    pytest.mark.skipif(
        PYTHON is None, reason="STATICLLM_EXPORT_PYTHON names no environment: `staticllm export --setup` makes one"
    ),
]


@pytest.fixture(scope="module")
def index(exported_minilm, tmp_path_factory):
    import openai
    from support.server.served import serving

    from staticllm.server.models.served import model_spec

    spec = importlib.util.spec_from_file_location("search_folder", ROOT / "examples" / "search_folder.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with serving([model_spec(str(exported_minilm))]) as served:
        client = openai.OpenAI(base_url=served.url, api_key="any")
        index = example.FolderIndex(client, "minilm", ROOT / "docs", tmp_path_factory.mktemp("store"))
        index.update()
        yield index


def test_the_right_file_is_among_the_first_five(index):
    assert len(QUESTIONS) == 30
    missed = []
    for each in QUESTIONS:
        found = [source["file"] for source in index.search(each["question"], "")]
        assert len(found) == len(set(found)) == 5
        if not set(found) & set(each["files"]):
            missed.append((each["question"], found))
    print(f"{len(QUESTIONS) - len(missed)} of {len(QUESTIONS)} questions; missed: {missed}")
    assert len(QUESTIONS) - len(missed) >= MIN_FOUND, missed
