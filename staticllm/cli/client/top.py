"""`staticllm top` shows again and again what the scheduler of a server does."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from typing import Any

import click

from staticllm.cli.client.server_client import ServerClient, server_options
from staticllm.cli.client.tables import table

BAR = 24
FIELDS = frozenset(["model", "models", "now", "cursor", "waiting_ms", "requests", "totals", "limits"])
"""What is read of the feed."""
MAX_REQUESTS = 20
"""The requests that are listed; more are counted."""


@click.command("top")
@click.argument("model", required=False)
@click.option(
    "--interval", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Seconds between looks."
)
@click.option("--count", type=click.IntRange(min=1), help="End after this number of looks.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per look.")
@server_options
def command(client: ServerClient, model: str | None, interval: float, count: int | None, as_json: bool) -> None:
    """Show who waits, prefills and decodes in MODEL (by default the first chat model), and how the device is used."""
    before: dict[str, Any] | None = None
    number = 0
    while count is None or number < count:
        if number:
            time.sleep(interval)
        query: dict[str, str | int] = {"after": before["cursor"] if before else 0}
        found = client.get("/api/scheduler", **query, **({} if model is None else {"model": model}))
        if not found.keys() >= FIELDS:
            raise client.foreign()
        if as_json:
            click.echo(json.dumps(found))
        else:
            if number and sys.stdout.isatty():
                click.clear()
            click.echo("\n".join(lines_of(client.url, found, before)))
        before, number = found, number + 1


def lines_of(url: str, found: dict[str, Any], before: dict[str, Any] | None) -> list[str]:
    """Return what a person reads of the feed ``found``, with rates since the feed ``before``."""
    status = next((each["status"] for each in found["models"] if each["name"] == found["model"]), "?")
    head = f"{found['model']} at {url}: {status}"
    totals, limits = found["totals"], found["limits"]
    if totals is None or limits is None:
        return [head, "nothing is loaded, or its process is being started"]
    lines = [f"{head}, {totals['requests']} answers, {totals['calls']} device calls, {totals['preemptions']} preempted"]
    lines += _rates(totals, before, found)
    states = [each["status"] for each in found["requests"]]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    lines.append(
        f"requests  {counts or 'none'} (at most {limits['num_seqs']} at once); {len(found['waiting_ms'])} of at most "
        f"{limits['max_waiting']} wait in the server"
    )
    if limits["kv_slots"]:
        lines.append(
            f"KV slots  {_bar(totals['slots_in_use'] / limits['kv_slots'])} {totals['slots_in_use']} of {limits['kv_slots']}"
        )
    if found["requests"]:
        lines += [
            "",
            table(["id", "state", "prompt", "cached", "computed", "answer", "TTFT ms"], _rows(found["requests"])),
        ]
        if len(found["requests"]) > MAX_REQUESTS:
            lines.append(f"and {len(found['requests']) - MAX_REQUESTS} more")
    return lines


def _rates(totals: dict[str, Any], before: dict[str, Any] | None, found: dict[str, Any]) -> Iterable[str]:
    """Return the lines about the time between two feeds: shares of the device, and tokens per second."""
    yield (
        f"latency   TTFT {totals['ttft_ms']:.0f} ms (95 %: {totals['ttft_p95_ms']:.0f}), TPOT {totals['tpot_ms']:.1f} ms, "
        f"longest gap {totals['longest_gap_ms']:.0f} ms"
    )
    old = before and before["totals"]
    seconds = found["now"] - before["now"] if before else 0.0
    if not old or seconds <= 0 or old["calls"] > totals["calls"]:  # the first look, or it was loaded again
        return
    prefill, decode = ((totals[name] - old[name]) / seconds for name in ("prefill_seconds", "decode_seconds"))
    yield f"device    {_bar(prefill + decode)} {prefill:.0%} prefill, {decode:.0%} decode"
    new, read = totals["output_tokens"] - old["output_tokens"], totals["prompt_tokens"] - old["prompt_tokens"]
    cached = totals["cached_tokens"] - old["cached_tokens"]
    yield f"tokens/s  {new / seconds:.1f} generated, {read / seconds:.1f} of prompts, {cached / seconds:.1f} cached"


def _rows(requests: list[dict[str, Any]]) -> list[list[str]]:
    return [
        [str(each["id"]), each["status"], str(each["prompt_tokens"]), str(each["cached_tokens"]),
         str(each["computed_tokens"]), str(each["output_tokens"]),
         "-" if each["ttft_ms"] is None else f"{each['ttft_ms']:.0f}"]
        for each in requests[:MAX_REQUESTS]
    ]  # fmt: skip


def _bar(share: float) -> str:
    full = round(min(1.0, max(0.0, share)) * BAR)
    return f"[{'#' * full}{'.' * (BAR - full)}]"
