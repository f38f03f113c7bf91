"""The commands that look at a server: ``staticllm ps``, ``stop`` and ``top``; and the list of its models."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import quote

import click

from staticllm.cli.options import flag, look_options
from staticllm.cli.server_client import ServerClient, server_options
from staticllm.cli.terminal import cell, look_again
from staticllm.errors import StaticLLMError
from staticllm.system.table import table

MOST_SECONDS = 100 * 365 * 86400.0
"""A model that is kept longer is never unloaded."""
WAIT_SECONDS = 10.0
LOOK_SECONDS = 0.1
UNLOADING: dict[str, tuple[str, dict[str, object]]] = {
    "chat": ("/api/generate", {}),
    "embedding": ("/api/embed", {"input": []}),
}
"""The endpoint and the body of a request that unloads a model of each kind, with ``keep_alive`` 0."""
BAR = 24
ADDED = ("calls", "ended", "dropped")
"""The fields of the feed of the scheduler that are of one page; the others are of the whole scheduler."""
FIELDS = frozenset(["model", "models", "now", "cursor", "waiting_ms", "requests", "totals", "limits", *ADDED])
"""The fields that are read of the feed of the scheduler."""
PAGE = 1024
"""Calls and ended answers of a page that the next one continues, ``MAX_ENTRIES`` of the server's feed."""
MAX_PAGES = 16
"""Pages of one look; a server keeps 8 of them."""
MAX_REQUESTS = 20
"""The requests that are listed; more are counted."""


def list_served(client: ServerClient, as_json: bool) -> None:
    """Print the models that a server knows, with their kinds, and whether they are loaded."""
    models = client.objects("/v1/models", "data")
    if as_json:
        click.echo(json.dumps(models, indent=2))
        return
    rows = [
        [cell(each.get("id")), cell(each.get("type")), cell(each.get("status")), cell(each.get("max_model_len", ""))]
        for each in models
    ]
    click.echo(table(["name", "kind", "status", "tokens"], rows))


@click.command("ps")
@flag("--json as_json", "Print JSON.")
@server_options
def ps(client: ServerClient, as_json: bool) -> None:
    """List the models that a server has loaded, with their sizes, and when each will be unloaded."""
    models = client.objects("/api/ps", "models")
    if as_json:
        click.echo(json.dumps(models, indent=2))
        return
    rows = [
        [cell(each.get("name")).removesuffix(":latest"), _size(each.get("size")), cell(each.get("context_length") or None),
         _until(each.get("expires_at"))]
        for each in models
    ]  # fmt: skip
    click.echo(table(["name", "size", "tokens", "until"], rows))


def _size(num_bytes: object) -> str:
    return f"{num_bytes >> 20} MiB" if isinstance(num_bytes, int) else "-"


def _until(moment: object) -> str:
    """Return when a model will be unloaded: never, or in how many seconds; "-" if the server does not say it."""
    try:
        until = datetime.fromisoformat(str(moment).replace("Z", "+00:00"))
        left = (until - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError):  # also of a time without a zone
        return "-"
    return "never" if left > MOST_SECONDS else f"in {max(0.0, left):.0f} s"


@click.command("stop")
@click.argument("model")
@flag("--json as_json", "Print JSON.")
@server_options
def stop(client: ServerClient, model: str, as_json: bool) -> None:
    """Unload MODEL, when its running answers have ended. Its next request loads it again."""
    kind = _described(client, model).get("type")
    if not isinstance(kind, str):
        raise client.foreign()
    if kind not in UNLOADING:
        raise StaticLLMError(
            f"{model!r} is a model of the kind {cell(kind)}, which no request unloads: use --idle-unload"
        )
    path, body = UNLOADING[kind]
    client.post(path, {"model": model, "keep_alive": 0, **body})
    until = time.monotonic() + WAIT_SECONDS
    while (status := _described(client, model).get("status")) == "loaded" and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
    if as_json:
        click.echo(json.dumps({"model": model, "status": status}))
    elif status == "loaded":
        click.echo(f"{model} is in use, and is unloaded when its answers have ended")
    else:
        click.echo(f"{model} is unloaded")


def _described(client: ServerClient, model: str) -> dict[str, Any]:
    """Return what the server says of a model; the error about an unknown one lists what it has."""
    return client.get(f"/v1/models/{quote(model, safe='')}")


@click.command("top")
@click.argument("model", required=False)
@look_options
@server_options
def top(client: ServerClient, model: str | None, interval: float, count: int | None, as_json: bool) -> None:
    """Show which requests wait, prefill and decode in MODEL (by default the first chat model), and how the device is used."""

    def page_after(cursor: int) -> dict[str, Any]:
        query: dict[str, str | int] = {"after": cursor}
        found = client.get("/api/scheduler", **query, **({} if model is None else {"model": model}))
        if not found.keys() >= FIELDS:
            raise client.foreign()
        return found

    def look(before: dict[str, Any] | None) -> dict[str, Any]:
        page = page_after(before["cursor"] if before else 0)
        found = page
        for _ in range(MAX_PAGES - 1):
            if len(page["calls"]) + len(page["ended"]) < PAGE:
                break
            page = page_after(page["cursor"])
            found = {**page, **{name: found[name] + page[name] for name in ADDED}}
        return found

    look_again(look, partial(lines_of, client.url), interval, count, as_json)


def lines_of(url: str, found: dict[str, Any], before: dict[str, Any] | None) -> list[str]:
    """Return what a person reads of the feed ``found``, with rates since the feed ``before``."""
    status = next((each["status"] for each in found["models"] if each["name"] == found["model"]), "?")
    head = f"no chat model at {url}" if found["model"] is None else f"{found['model']} at {url}: {status}"
    totals = found["totals"]
    limits = found["limits"]
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
    new = totals["output_tokens"] - old["output_tokens"]
    read = totals["prompt_tokens"] - old["prompt_tokens"]
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
