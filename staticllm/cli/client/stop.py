"""`staticllm stop` unloads a model of a server."""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.parse import quote

import click

from staticllm.cli.client.server_client import ServerClient, server_options
from staticllm.cli.client.tables import cell
from staticllm.errors import StaticLLMError

WAIT_SECONDS = 10.0
LOOK_SECONDS = 0.1
ENDPOINTS: dict[str, tuple[str, dict[str, object]]] = {
    "chat": ("/api/generate", {}),
    "embedding": ("/api/embed", {"input": []}),
}
"""What unloads a model of each kind, with ``keep_alive`` 0."""


@click.command("stop")
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@server_options
def command(client: ServerClient, model: str, as_json: bool) -> None:
    """Unload MODEL, when its running answers have ended. Its next request loads it again."""
    kind = _described(client, model).get("type")
    if not isinstance(kind, str):
        raise client.foreign()
    if kind not in ENDPOINTS:
        raise StaticLLMError(
            f"{model!r} is a model of the kind {cell(kind)}, which no request unloads: use --idle-unload"
        )
    path, body = ENDPOINTS[kind]
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
    """Return what the server says of a model.

    Raises:
        ServerError: it has none of this name; the message lists what it has.
    """
    return client.get(f"/v1/models/{quote(model, safe='')}")
