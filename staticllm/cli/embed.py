"""``staticllm embed`` turns texts into vectors, and ``staticllm rerank`` sorts texts by how well they answer a query."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from staticllm.cli.grouped_command import GroupedCommand
from staticllm.cli.options import (
    Whole,
    as_text,
    check_output,
    encoder_arguments,
    encoder_model,
    encoder_options,
    flag,
    value,
)
from staticllm.cli.progress import Progress, progress
from staticllm.cli.texts import TextBatch, TextInput, text_options
from staticllm.errors import ConfigError, StaticLLMError, quoted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from staticllm.cli.vector_files import Write
    from staticllm.pipelines.text_embedding_pipeline import StaticEmbeddingPipeline


import json

POOLINGS = {"cls": "CLS", "mean": "MEAN", "last": "LAST_TOKEN"}
IN_FLIGHT = 2
"""Batches at once: one is tokenized while the other runs."""


GROUPS = {"Text before each text": ("prompt", "kind"), "Vectors": ("form", "dimensions", "pooling")}


@click.command("embed", cls=GroupedCommand, groups=GROUPS)
@text_options
@encoder_model
@value("-o --output", click.Path(), "File to write: .npy or .jsonl.  [JSON lines to stdout]")
@value("--format form", click.Choice(["npy", "jsonl"]), "Format.  [that of the suffix; jsonl]")
@value("--prompt", None, "Text to put before each text.")
@click.option("--query", "kind", flag_value="query", help="Put the model's prompt for queries before each text.")
@click.option("--document", "kind", flag_value="document", help="Put its prompt for documents there.  [the default]")
@value("--dimensions", Whole(1), "Leading values to keep, for models trained for it (Matryoshka).")
@value("--pooling", click.Choice(list(POOLINGS)), "How tokens become one vector.  [the model's own]")
@encoder_options
def embed(model: str, texts: tuple[str, ...], **options: Any) -> None:
    """Embed TEXTS, the lines of a file, or lines from stdin, with the encoder in MODEL.

    MODEL is the first argument, unless -m names it. Each line of a file is a text. With --field, or if the file is named
    .jsonl, each line is a JSON object with the text in a field; JSON lines keep its other fields. Vectors are written in
    the order of the texts. Files of any size are read and written in parts, and the output appears when it is whole.
    """
    form = _check(options)
    text_input = TextInput(texts, options["file"], options["field"])
    with text_input.batches() as batches, progress("loading") as shown:
        first = next(batches)  # a mistake in the first lines is told before the model is loaded
        with _load(model, options, shown) as pipe:
            _embed(pipe, text_input, chain([first], batches), form, options, shown)


def _check(options: dict[str, Any]) -> str:
    """Check what can be checked before anything is read, and return the format.

    Raises:
        UsageError: two options contradict each other.
        ConfigError: the output cannot be written.
    """
    from staticllm.cli.vector_files import chosen_format

    if options["prompt"] is not None and options["kind"] is not None:
        raise click.UsageError(f"--prompt and --{options['kind']} both say what goes before a text: leave one out")
    output = options["output"]
    form = chosen_format(output, options["form"])
    if output is not None:
        check_output(output)
        path = Path(output).resolve()
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"{quoted(output)} cannot be written: no permission")
    return form


def _load(model: str, options: dict[str, Any], shown: Progress) -> StaticEmbeddingPipeline:
    from staticllm.pipelines.embedding.embedding_config import PoolingType
    from staticllm.pipelines.text_embedding_pipeline import StaticEmbeddingPipeline

    arguments = encoder_arguments(options)
    if options["pooling"] is not None:
        arguments["pooling_type"] = getattr(PoolingType, POOLINGS[options["pooling"]])
    return StaticEmbeddingPipeline(model, on_progress=shown, **arguments)


def _embed(
    pipe: StaticEmbeddingPipeline,
    text_input: TextInput,
    batches: Iterator[TextBatch],
    form: str,
    options: dict[str, Any],
    shown: Progress,
) -> None:
    from staticllm.cli.vector_files import vector_writer

    dimensions = options["dimensions"]
    if dimensions is not None and dimensions > pipe.width:
        raise ConfigError(f"--dimensions {dimensions}: the model's vectors have {pipe.width} values")
    if options["output"] is None and sys.stdout.isatty():
        shown.close()  # the lines of output would be written over the bar
    prompt = options["prompt"]
    prompt = pipe.prompts[options["kind"] or "document"] if prompt is None else as_text(prompt, "--prompt")
    with vector_writer(options["output"], form) as write:
        Embedder(pipe, text_input, prompt, dimensions, shown).run(batches, write)


class _StoppedError(Exception):
    """The command has ended, so that a batch need not go on."""


class Embedder:
    """Embeds batches, a few at once, and writes their vectors in order."""

    def __init__(
        self, pipe: StaticEmbeddingPipeline, text_input: TextInput, prompt: str, dimensions: int | None, shown: Progress
    ) -> None:
        self._pipe = pipe
        self._text_input = text_input
        self._prompt = prompt
        self._dimensions = dimensions
        self._shown = shown
        self._num_done = 0
        self._share = 0.0
        self._lock = threading.Lock()
        self._is_stopped = False

    def run(self, batches: Iterator[TextBatch], write: Write) -> None:
        """Embed all batches. After an exception, also Ctrl-C, no thread is left.

        Raises:
            StaticLLMError: a text cannot be embedded.
        """
        running: deque[tuple[TextBatch, Future[NDArray[Any]]]] = deque()
        with ThreadPoolExecutor(IN_FLIGHT, "staticllm-embed") as pool:
            try:
                for batch in batches:
                    running.append((batch, pool.submit(self._encode, batch)))
                    if len(running) == IN_FLIGHT:
                        self._write(write, *running.popleft())
                while running:
                    self._write(write, *running.popleft())
            finally:
                self._is_stopped = True
                for _, future in running:
                    future.cancel()

    def _write(self, write: Write, batch: TextBatch, future: Future[NDArray[Any]]) -> None:
        write(batch.entries, future.result())
        self._share = batch.share or 0.0

    def _encode(self, batch: TextBatch) -> NDArray[Any]:
        done = 0

        def tell(num_done: int, total: int) -> None:
            nonlocal done
            if self._is_stopped:
                raise _StoppedError
            with self._lock:
                self._num_done += num_done - done
                done = num_done
                share = 0 if batch.share is None else 100
                self._shown.show(f"embedding, {self._num_done} texts", int(100 * self._share), share)

        try:
            return self._pipe.encode(batch.texts, prompt=self._prompt, dimensions=self._dimensions, on_progress=tell)
        except StaticLLMError as error:
            raise self._text_input.located(error, batch) from error


@click.command("rerank")
@text_options
@encoder_model
@click.option("--query", required=True, help="What the texts are sorted by.")
@value("--top-n", Whole(1), "Texts to print, the best ones.  [all]")
@flag("--json as_json", "Print one JSON object per text.")
@encoder_options
def rerank(model: str, texts: tuple[str, ...], query: str, top_n: int | None, as_json: bool, **options: Any) -> None:
    """Sort TEXTS, the lines of a file, or lines from stdin by the QUERY, with the reranker in MODEL.

    MODEL is the first argument, unless -m names it. Print the index of each text, from 0, its score and the text, the
    best first. Texts are read as by `staticllm embed`.
    """
    query = as_text(query, "--query")
    text_input = TextInput(texts, options["file"], options["field"])
    with text_input.batches() as batches:
        entries = [entry for batch in batches for entry in batch.entries]
    with progress("loading") as shown:
        ranking = _rank(model, query, TextBatch(entries, 1.0), text_input, encoder_arguments(options), shown)[:top_n]
    for index, score in ranking:
        text = entries[index].text
        if as_json:
            click.echo(json.dumps({"index": index, "score": score, "text": text}, ensure_ascii=False))
        else:
            click.echo(f"{index}\t{score:.6f}\t{text}")


def _rank(
    model: str, query: str, batch: TextBatch, text_input: TextInput, arguments: dict[str, Any], shown: Progress
) -> list[tuple[int, float]]:
    from staticllm.pipelines.text_rerank_pipeline import StaticRerankPipeline, ranking

    with StaticRerankPipeline(model, on_progress=shown, **arguments) as pipe:
        try:
            scores = pipe.scores(
                query, batch.texts, on_progress=lambda done, total: shown.show(f"scoring, {done} texts", done, total)
            )
        except StaticLLMError as error:
            raise text_input.located(error, batch) from error
    return ranking(scores, len(scores))
