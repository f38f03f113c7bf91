"""``staticllm rerank`` sorts texts by how well they answer a query."""

from __future__ import annotations

import json
from typing import Any

import click

from staticllm.cli.options import Whole, as_text, encoder_arguments, encoder_model, encoder_options
from staticllm.cli.progress import Progress, progress
from staticllm.cli.texts import Batch, TextSource, text_options
from staticllm.errors import StaticLLMError


@click.command("rerank")
@text_options
@encoder_model
@click.option("--query", required=True, help="What the texts are sorted by.")
@click.option("--top-n", type=Whole(1), help="Texts to print, the best ones.  [all]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per text.")
@encoder_options
def command(model: str, texts: tuple[str, ...], query: str, top_n: int | None, as_json: bool, **options: Any) -> None:
    """Sort TEXTS, the lines of a file, or lines from stdin by the QUERY, with the reranker in MODEL.

    MODEL is the first argument, unless -m names it. Print the index of each text, from 0, its score and the text, the
    best first. Texts are read as by `staticllm embed`.
    """
    query = as_text(query, "--query")
    source = TextSource(texts, options["file"], options["field"])
    with source.batches() as batches:
        entries = [entry for batch in batches for entry in batch.entries]
    with progress("loading") as shown:
        ranking = _rank(model, query, Batch(entries, 1.0), source, encoder_arguments(options), shown)[:top_n]
    for index, score in ranking:
        text = entries[index].text
        if as_json:
            click.echo(json.dumps({"index": index, "score": score, "text": text}, ensure_ascii=False))
        else:
            click.echo(f"{index}\t{score:.6f}\t{text}")


def _rank(
    model: str, query: str, batch: Batch, source: TextSource, arguments: dict[str, Any], shown: Progress
) -> list[tuple[int, float]]:
    from staticllm.pipelines.text_rerank_pipeline import StaticRerankPipeline, ranking

    with StaticRerankPipeline(model, on_progress=shown, **arguments) as pipe:
        try:
            scores = pipe.scores(
                query, batch.texts, on_progress=lambda done, total: shown.show(f"scoring, {done} texts", done, total)
            )
        except StaticLLMError as error:
            raise source.located(error, batch) from error
    return ranking(scores, len(scores))
