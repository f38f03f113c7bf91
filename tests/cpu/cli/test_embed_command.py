"""Tests ``staticllm embed``: inputs, outputs and mistakes, in this process and as a child."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from support import command_line
from support.encoders.encoder_models import encoder_directory, unpack

from staticllm import demo_model_path
from staticllm.cli import embed, texts
from staticllm.pipelines.embedding.encoder_runner import EncoderRunner
from staticllm.pipelines.text_embedding_pipeline import StaticEmbeddingPipeline

F32 = ("--precision", "f32")
LINES = ["a fox", "", "What is an NPU?", "äöü 狐"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return encoder_directory(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def pipe(directory):
    with StaticEmbeddingPipeline(directory, "CPU", INFERENCE_PRECISION_HINT="f32") as found:
        yield found


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return path


def objects(text):
    return [json.loads(line) for line in text.splitlines()]


def vectors(text):
    return np.array([entry["embedding"] for entry in objects(text)], np.float32)


def test_arguments_become_json_lines(staticllm, directory, pipe):
    done = staticllm("embed", directory, *F32, "a fox", "äöü 狐")
    assert (done.returncode, done.stderr) == (0, "")
    assert [entry["text"] for entry in objects(done.stdout)] == ["a fox", "äöü 狐"]
    np.testing.assert_allclose(vectors(done.stdout), pipe.encode(["a fox", "äöü 狐"]), atol=1e-6, rtol=0)


@command_line.IN_BOTH
def test_lines_of_a_file_of_stdin_and_of_a_dash_are_the_same(staticllm, directory, pipe, file):
    by_file = staticllm("embed", directory, *F32, "--file", file)
    by_stdin = staticllm("embed", "-m", directory, *F32, stdin=file.read_text(encoding="utf-8"))
    by_dash = staticllm("embed", directory, *F32, "-f", "-", stdin="\ufeff" + "\r\n".join(LINES))
    for found in (by_file, by_stdin, by_dash):  # calls of other sizes round otherwise
        assert [entry["text"] for entry in objects(found.stdout)] == LINES
        np.testing.assert_allclose(vectors(found.stdout), pipe.encode(LINES), atol=1e-6, rtol=0)


def test_json_lines_keep_their_fields(staticllm, directory, pipe, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": 7, "text": "a fox"}\n\n{"text": "b", "embedding": 3, "tags": ["ä"]}\n', encoding="utf-8")
    done = staticllm("embed", directory, *F32, "--file", path)
    first, second = objects(done.stdout)
    assert list(first) == ["id", "text", "embedding"]
    assert second["tags"] == ["ä"]
    np.testing.assert_allclose(second["embedding"], pipe.encode(["b"])[0], atol=1e-6, rtol=0)
    named = staticllm("embed", directory, *F32, "--field", "body", stdin='{"body": "a fox"}')
    np.testing.assert_allclose(objects(named.stdout)[0]["embedding"], first["embedding"], atol=1e-6, rtol=0)


@command_line.IN_BOTH
@pytest.mark.parametrize("kind", ["npy", "jsonl"])
def test_every_format_holds_the_vectors_of_encode(staticllm, directory, pipe, file, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(texts, "BATCH_TEXTS", 2)  # so that there are two batches
    path = tmp_path / f"out.{kind}"
    done = staticllm("embed", directory, *F32, "--file", file, "-o", path)
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("", "")
    found = np.load(path) if kind == "npy" else vectors(path.read_text(encoding="utf-8"))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, pipe.encode(LINES), atol=1e-6, rtol=0)
    assert sorted(tmp_path.iterdir()) == sorted([file, path]), "nothing else is left"


def test_prompts_dimensions_pooling_and_length_reach_the_encoder(staticllm, directory, pipe, tmp_path):
    def embedded(*options):
        done = staticllm("embed", directory, *F32, "a fox runs", *options)
        assert done.returncode == 0, done.stderr
        return vectors(done.stdout)

    np.testing.assert_allclose(embedded("--query"), pipe.encode(["query: a fox runs"]), atol=1e-6)
    np.testing.assert_allclose(embedded("--document"), pipe.encode(["a fox runs"]), atol=1e-6)
    np.testing.assert_allclose(embedded("--prompt", "so: "), pipe.encode(["so: a fox runs"]), atol=1e-6)
    np.testing.assert_allclose(embedded("--dimensions", 8), pipe.encode(["a fox runs"], dimensions=8), atol=1e-6)
    assert np.abs(embedded("--pooling", "last") - embedded()).max() > 0.01
    assert np.abs(embedded("--max-length", 2) - embedded()).max() > 0.01


def test_long_inputs_are_read_in_batches_and_keep_their_order(directory, pipe, monkeypatch, tmp_path):
    monkeypatch.setattr(texts, "BATCH_TEXTS", 7)
    seen = []
    original = StaticEmbeddingPipeline.encode

    def encode(self, texts, **options):
        seen.append(len(texts))
        return original(self, texts, **options)

    monkeypatch.setattr(StaticEmbeddingPipeline, "encode", encode)
    lines = [f"text {i}" for i in range(100)]
    done = command_line.in_here("embed", directory, *F32, "-o", tmp_path / "x.npy", stdin="\n".join(lines))
    assert done.returncode == 0, done.stderr
    assert sorted(seen) == [2] + [7] * 14
    monkeypatch.undo()
    np.testing.assert_allclose(np.load(tmp_path / "x.npy"), pipe.encode(lines), atol=1e-6, rtol=0)


def test_batches_end_with_many_characters():
    entries = (texts.TextEntry("x" * (texts.BATCH_CHARS // 3 + 1), i, {}) for i in range(7))
    assert [len(batch.entries) for batch in texts._batches(entries, lambda: None)] == [3, 3, 1]


MISTAKES = [
    (["t", "--file", "IN"], b"a", 2, "texts are given twice"),
    (["t", "--field", "x"], b"", 2, "--field is for JSON lines"),
    (["--file", "IN"], b"", 1, "in.txt is empty: give one text per line"),
    (["--file", "IN", "--field", "text"], b"{}\n", 1, "in.txt, line 1: has no field 'text' (it has none)"),
    (
        ["--file", "IN", "--field", "a"],
        b'{"a": "x"}\n{"b": 1, "c": 2}',
        1,
        "line 2: has no field 'a' (it has 'b', 'c')",
    ),
    (["--file", "IN", "--field", "a"], b'{"a": 3}', 1, "line 1: field 'a' holds a int: must be a string"),
    (["--file", "IN", "--field", "a"], b'["a"]', 1, "line 1: holds a list: must be an object"),
    (["--file", "IN", "--field", "a"], b'{"a": "x"}\nnot', 1, "line 2: is not JSON"),
    (["--file", "IN", "--field", "a"], b"[" * 100000, 1, "line 1: is not JSON"),
    (["--file", "IN", "--field", "a"], b'{"a": "\\ud800"}', 1, "line 1: field 'a' holds half a character"),
    (["--file", "IN"], b"ok\n\xff\xfe", 1, "line 2: is not text in UTF-8 (byte 0xff at 0): convert it first"),
    (["--file", "IN"], b"a\0b", 1, "line 1: is binary"),
    (["--file", "FOLDER"], b"", 1, "is a folder: give a file with one text per line"),
    (["--file", "IN.missing"], b"", 1, "No such file or directory"),
    (["t", "-o", "FOLDER/none/x.npy"], b"", 1, "does not exist: make it first"),
    (["t", "-o", "FOLDER"], b"", 2, "the suffix says no format"),
    (["t", "-o", "FOLDER", "--format", "npy"], b"", 1, "is a folder: choose the path of a file"),
    (["t", "-o", "IN.csv"], b"", 2, "the suffix says no format: use .npy"),
    (["t", "--prompt", "a", "--query"], b"", 2, "--prompt and --query both say"),
    (["t", "-o", "/dev/null", "--format", "npy"], b"", 2, "npy is written to a file: give --output FILE.npy"),
    (["t", "--dimensions", "33"], b"", 1, "--dimensions 33: the model's vectors have 32 values"),
    (["t", "--dimensions", "0"], b"", 2, "--dimensions"),
    (["t", "--device", "QPU"], b"", 1, "QPU"),
]


@pytest.mark.parametrize(("arguments", "content", "code", "said"), MISTAKES)
def test_a_mistake_is_one_line_and_leaves_no_file(directory, tmp_path, arguments, content, code, said):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "in.txt").write_bytes(content)
    places = {"IN": str(tmp_path / "in.txt"), "FOLDER": str(folder)}
    for name, place in places.items():
        arguments = [argument.replace(name, place) for argument in arguments]
    if "-o" not in arguments:
        arguments += ["-o", str(folder / "out.npy")]
    done = command_line.in_here("embed", directory, *arguments)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert code == 2 or done.stderr.splitlines() == [line]
    assert "Traceback" not in done.stderr
    assert list(folder.iterdir()) == []


def test_a_model_that_is_missing_or_no_encoder_is_one_line(staticllm, tmp_path):
    empty, scores = tmp_path / "empty", tmp_path / "scores"
    empty.mkdir()
    unpack("bert_scores", scores)
    for path in demo_model_path().glob("openvino_*tokenizer.*"):
        shutil.copy(path, scores)
    for model, said in (
        (tmp_path / "none", "no model directory"),
        (empty, "openvino_model.xml"),
        (scores, "is a cross-encoder"),
    ):
        done = staticllm("embed", model, "a text")
        assert done.returncode == 1
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert "give the directory of an encoder" in staticllm("embed").stderr


def test_a_failing_text_of_a_later_batch_is_named_by_its_line(directory, monkeypatch):
    monkeypatch.setattr(texts, "BATCH_TEXTS", 4)
    original = StaticEmbeddingPipeline.encode

    def encode(self, texts, **options):
        return original(self, [text if text != "bad" else 3 for text in texts], **options)

    monkeypatch.setattr(StaticEmbeddingPipeline, "encode", encode)
    done = command_line.in_here("embed", directory, stdin="a\nb\nc\nd\ne\nbad\n")
    assert done.returncode == 1
    assert done.stderr == "Error: standard input, line 6: is a int: must be a str\n"
    done = command_line.in_here("embed", directory, "--field", "text", stdin='{"text": "a"}\n\n{"text": "bad"}\n')
    assert done.stderr == "Error: standard input, line 3: is a int: must be a str\n", "empty lines are counted"
    done = command_line.in_here("embed", directory, "a", "bad")
    assert done.stderr == "Error: the arguments, text 2: is a int: must be a str\n"


def test_a_text_whose_vector_is_not_finite_is_named_by_its_line(directory, monkeypatch):
    monkeypatch.setattr(texts, "BATCH_TEXTS", 2)
    original = EncoderRunner.run

    def run(self, variant, sequences, meanwhile=None):
        vectors = original(self, variant, sequences, meanwhile)
        longest = np.array([len(text) for sequence in sequences for text in sequence]) > 20
        vectors[longest] = np.nan
        return vectors

    monkeypatch.setattr(EncoderRunner, "run", run)
    done = command_line.in_here("embed", directory, stdin="a\nb\nc\n" + "a long text " * 20 + "\ne\n")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: standard input, line 4: its embedding is not finite")


def test_an_existing_file_is_kept_if_a_later_line_fails(directory, tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "BATCH_TEXTS", 1)
    kinds = ("npy", "jsonl")
    for kind in kinds:
        path = tmp_path / f"out.{kind}"
        path.write_bytes(b"before")
        done = subprocess.run(
            [*command_line.STATICLLM, "embed", str(directory), "-o", str(path)],
            input=b"a\n" * 3000 + b"\xff\n", capture_output=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 1
        assert done.stderr.decode().splitlines() == [
            "Error: standard input, line 3001: is not text in UTF-8 (byte 0xff at 0): convert it first"
        ]
        assert path.read_bytes() == b"before"
    assert len(list(tmp_path.iterdir())) == len(kinds)


@pytest.mark.skipif(os.name == "nt" or not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(directory):
    done = command_line.in_child("embed", directory, "a", "-o", "/dev/full", "--format", "jsonl")
    assert done.returncode == 1
    assert done.stderr == "Error: '/dev/full' cannot be written: No space left on device\n"


@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX")
def test_ctrl_c_ends_at_once_and_leaves_no_file(directory, tmp_path):
    path = tmp_path / "out.npy"
    child = subprocess.Popen(
        [*command_line.STATICLLM, "embed", str(directory), "-o", str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdin is not None
    feeder = threading.Thread(target=feed, args=(child.stdin,))
    feeder.start()
    try:
        until = time.monotonic() + 60
        while not [p for p in tmp_path.iterdir() if p.stat().st_size > 1000]:
            assert time.monotonic() < until, "nothing was written"
            time.sleep(0.01)
        assert child.poll() is None
        child.send_signal(signal.SIGINT)
        assert child.wait(20) == 130
        assert b"Traceback" not in child.stderr.read()
        assert list(tmp_path.iterdir()) == []
    finally:
        child.kill()
        child.wait()
        feeder.join()
        for stream in (child.stdin, child.stdout, child.stderr):
            with_closed(stream)


def feed(stream):
    """Write lines until the reader has ended."""
    with suppress(BrokenPipeError):
        while True:
            stream.write(b"a fox runs\n" * 1000)


def with_closed(stream):
    with suppress(BrokenPipeError):
        stream.close()


def test_a_reader_that_has_ended_ends_the_command_quietly(directory):
    child = subprocess.Popen(
        [*command_line.STATICLLM, "embed", str(directory)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    child.stdout.close()
    feeder = threading.Thread(target=feed, args=(child.stdin,))
    feeder.start()
    assert child.stderr.read() == b""
    assert child.wait(60) == 1
    feeder.join()
    with_closed(child.stdin)
    child.stderr.close()


def test_progress_counts_texts_and_the_share_of_the_file(directory, file, monkeypatch, tmp_path):
    shown = []

    def show(self, *parts):
        if parts[0].startswith("embedding"):  # not the loading before it
            shown.append(parts)

    monkeypatch.setattr(embed.Progress, "show", show)
    monkeypatch.setattr(texts, "BATCH_TEXTS", 1)
    command_line.in_here("embed", directory, "--file", file, "-o", tmp_path / "x.npy")
    assert shown[-1][0] == "embedding, 4 texts"
    assert {total for _, _, total in shown} == {100}
    assert [share for _, share, _ in shown] == sorted(share for _, share, _ in shown)
    shown.clear()
    command_line.in_here("embed", directory, "-o", tmp_path / "x.npy", stdin="a\nb\n")
    assert {total for _, _, total in shown} == {0}, "the size of stdin is not known"
