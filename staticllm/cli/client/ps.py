"""`staticllm ps` lists the models that a server has loaded."""

from __future__ import annotations

import json
from datetime import datetime, timezone

import click

from staticllm.cli.client.server_client import ServerClient, server_options
from staticllm.cli.client.tables import table

FAR = 100 * 365 * 86400.0
"""Seconds; a model that is kept longer is never unloaded."""


@click.command("ps", short_help="List the loaded models of a server.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@server_options
def command(client: ServerClient, as_json: bool) -> None:
    """List the models that a server has loaded, with their sizes, and when each will be unloaded."""
    models = client.get("/api/ps")["models"]
    if as_json:
        click.echo(json.dumps(models, indent=2))
        return
    rows = [
        [each["name"].removesuffix(":latest"), f"{each['size'] >> 20} MiB", str(each["context_length"] or "-"),
         _until(each["expires_at"])]
        for each in models
    ]  # fmt: skip
    click.echo(table(["name", "size", "tokens", "until"], rows))


def _until(moment: str) -> str:
    """Return when a model will be unloaded: never, or in how many seconds."""
    left = (datetime.fromisoformat(moment.replace("Z", "+00:00")) - datetime.now(timezone.utc)).total_seconds()
    return "never" if left > FAR else f"in {max(0.0, left):.0f} s"
