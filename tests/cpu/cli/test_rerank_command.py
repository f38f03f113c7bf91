"""Tests ``staticllm rerank`` against the pipeline."""

from __future__ import annotations

import json
import zipfile

import pytest
from support import command_line
from support.encoders.encoder_models import ARCHIVES, unpack

from staticllm import StaticRerankPipeline
from staticllm.cli.progress import Progress

TEXTS = ["yes", "a fox is an animal, 12 of them.", "no", "the sun is hot"]
F32 = ("--precision", "f32")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reranker")
    unpack("bert_scores", folder)
    with zipfile.ZipFile(ARCHIVES / "bert_tokenizer.zip") as archive:
        archive.extractall(folder)
    return folder


@command_line.IN_BOTH
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


def test_a_text_that_cannot_be_scored_is_named_by_its_line(directory, monkeypatch):
    original = StaticRerankPipeline.scores

    def scores(self, query, texts, **options):
        return original(self, query, [text if text != "bad" else 3 for text in texts], **options)

    monkeypatch.setattr(StaticRerankPipeline, "scores", scores)
    done = command_line.in_here("rerank", directory, "--query", "a", stdin="a\nb\nbad\n")
    assert done.returncode == 1
    assert done.stderr == "Error: standard input, line 3: is a int: must be a str\n"


def test_the_bar_shows_loading_and_scoring(directory, monkeypatch):
    shown = []
    monkeypatch.setattr(Progress, "show", lambda self, text, done=0, total=0: shown.append((text, done, total)))
    done = command_line.in_here("rerank", directory, "--query", "a", *F32, *TEXTS)
    assert done.returncode == 0
    assert {"reading the model", "compiling", "warming up"} <= {text for text, _, _ in shown}
    assert shown[-1] == ("scoring, 4 texts", 4, 4)
