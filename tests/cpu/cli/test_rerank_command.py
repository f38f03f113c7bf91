"""Tests ``staticllm rerank`` against the pipeline."""

from __future__ import annotations

import json
import zipfile

import pytest
from encoder_models import ARCHIVES, unpack

from staticllm import StaticRerankPipeline

TEXTS = ["yes", "a fox is an animal, 12 of them.", "no", "the sun is hot"]
F32 = ("--precision", "f32")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reranker")
    unpack("bert_scores", folder)
    with zipfile.ZipFile(ARCHIVES / "bert_tokenizer.zip") as archive:
        archive.extractall(folder)
    return folder


def test_texts_are_printed_in_the_order_of_their_scores(staticllm, directory):
    with StaticRerankPipeline(directory, "CPU", top_n=4, INFERENCE_PRECISION_HINT="f32") as pipe:
        expected = pipe.rerank("a fox", TEXTS)
    done = staticllm("rerank", directory, "--query", "a fox", *F32, *TEXTS)
    assert done.stdout == "".join(f"{index}\t{score:.6f}\t{TEXTS[index]}\n" for index, score in expected)
    done = staticllm("rerank", directory, "--query", "a fox", *F32, "--json", "--top-n", 2, stdin="\n".join(TEXTS))
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(entry["index"], entry["text"]) for entry in found] == [(i, TEXTS[i]) for i, _ in expected[:2]]
    assert [entry["score"] for entry in found] == pytest.approx([score for _, score in expected[:2]], abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["a"], 2, "--query"),
        (["--query", "a"], 1, "standard input is empty"),
        (["--query", "a", "t", "--top-n", "0"], 2, "top-n"),
    ],
)
def test_a_mistake_is_one_line(staticllm, directory, arguments, code, said):
    done = staticllm("rerank", directory, *arguments)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
