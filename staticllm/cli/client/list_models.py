"""`staticllm list` lists the models that a server knows."""

from __future__ import annotations

import json

import click

from staticllm.cli.client.server_client import ServerClient, server_options
from staticllm.cli.client.tables import cell, table


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@server_options
def command(client: ServerClient, as_json: bool) -> None:
    """List the models that a server knows, with their kinds, and whether they are loaded."""
    models = client.objects("/v1/models", "data")
    if as_json:
        click.echo(json.dumps(models, indent=2))
        return
    rows = [
        [cell(each.get("id")), cell(each.get("type")), cell(each.get("status")), cell(each.get("max_model_len", ""))]
        for each in models
    ]
    click.echo(table(["name", "kind", "status", "tokens"], rows))
