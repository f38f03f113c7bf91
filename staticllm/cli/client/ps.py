"""`staticllm ps` lists the models that a server has loaded."""

from __future__ import annotations

import json
from datetime import datetime, timezone

import click

from staticllm.cli.client.server_client import ServerClient, server_options
from staticllm.cli.client.tables import cell, table

FAR = 100 * 365 * 86400.0
"""Seconds; a model that is kept longer is never unloaded."""


@click.command("ps")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@server_options
def command(client: ServerClient, as_json: bool) -> None:
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
        left = (until - datetime.now(timezone.utc)).total_seconds()
    except (ValueError, TypeError):  # also of a time without a zone
        return "-"
    return "never" if left > FAR else f"in {max(0.0, left):.0f} s"
