"""`staticllm run --server` answers a prompt, or chats, with a model of a server."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import click

from staticllm.cli.client.server_client import ServerClient, ServerError
from staticllm.cli.client.tables import printable

NOT_HERE = (
    "device",
    "max_prompt_len",
    "min_response_len",
    "programs",
    "precision",
    "kv_precision",
    "properties",
    "profile",
)
"""Options of ``staticllm run`` that are the server's to decide."""


class RemoteRun:
    """The requests of one command to one model of a server. ``options``: those of ``staticllm run``."""

    def __init__(self, client: ServerClient, model: str | None, options: dict[str, Any]) -> None:
        self._client, self._options = client, options
        names = {
            "max_new_tokens": "max_tokens",
            "temperature": "temperature",
            "top_p": "top_p",
            "top_k": "top_k",
            "seed": "seed",
        }
        self._body = {names[name]: options[name] for name in names if options[name] is not None}
        self._body |= {"stream": True, "stream_options": {"include_usage": True}}
        if model is not None:
            self._body["model"] = model
        self._messages = [{"role": "system", "content": options["system"]}] if options["system"] else []

    def answer(self, prompt: str) -> None:
        """Print the answer to one prompt, as it comes or as one JSON object.

        Raises:
            ServerError: there is no server, or it refused.
        """
        is_quiet = self._options["as_json"]
        found = self._send([*self._messages, {"role": "user", "content": prompt}], prompt, is_quiet)
        if is_quiet:
            click.echo(json.dumps(found))
            return
        click.echo()
        if self._options["stats"]:
            _print_stats(found)

    def chat(self) -> None:
        """Read and answer messages until Ctrl-D or /exit; Ctrl-C stops an answer, and leaves at the prompt."""
        from staticllm.cli.chat import line_reader

        read = line_reader()
        click.echo("Ctrl-C stops an answer; Ctrl-D leaves. /clear begins a new conversation.", err=True)
        first = len(self._messages)
        while True:
            try:
                text = read().strip()
            except (EOFError, KeyboardInterrupt):
                click.echo()
                return
            if text in ("/exit", "/quit", "/bye"):
                return
            if text == "/clear":
                del self._messages[first:]
            elif text:
                self._take_turn(text)

    def _take_turn(self, text: str) -> None:
        messages = [*self._messages, {"role": "user", "content": text}]
        try:
            found = self._send(messages, text, is_quiet=False)
        except ServerError as error:
            click.echo(f"\nError: {error}", err=True)
            return
        except KeyboardInterrupt:
            click.echo(" [stopped]")
            return
        click.echo()
        self._messages = [*messages, {"role": "assistant", "content": found["text"]}]
        if self._options["stats"]:
            _print_stats(found)

    def _send(self, messages: list[dict[str, str]], prompt: str, is_quiet: bool) -> dict[str, Any]:
        is_raw = self._options["raw"]
        path = "/v1/completions" if is_raw else "/v1/chat/completions"
        body = {**self._body, **({"prompt": prompt} if is_raw else {"messages": messages})}
        pieces: list[str] = []
        reason, model = None, None
        usage: dict[str, Any] = {}
        begin, first = time.perf_counter(), None
        with self._client.stream(path, body) as events:
            for event in events:
                model, usage = event.get("model", model), event.get("usage") or usage
                for choice in event.get("choices") or ():
                    piece = choice.get("text") if is_raw else (choice.get("delta") or {}).get("content")
                    reason = choice.get("finish_reason") or reason
                    if piece:
                        first = first or time.perf_counter()
                        pieces.append(piece)
                        if not is_quiet:
                            _show(piece)
        end = time.perf_counter()
        return {
            "text": "".join(pieces),
            "finish_reason": reason,
            "model": model,
            "prompt_tokens": usage.get("prompt_tokens"),
            "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            "generated_tokens": usage.get("completion_tokens"),
            "ttft_ms": None if first is None else round((first - begin) * 1e3, 3),
            "total_ms": round((end - begin) * 1e3, 3),
        }


def _show(piece: str) -> None:
    """Write a piece of an answer. A terminal gets none of the escapes that a model may write."""
    sys.stdout.write(printable(piece) if sys.stdout.isatty() else piece)
    sys.stdout.flush()


def check_options(context: click.Context) -> None:
    """Check that no option was given that only the server can decide.

    Raises:
        UsageError: one was.
    """
    for name in NOT_HERE:
        if context.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE:
            option = next(each for each in context.command.params if each.name == name)
            raise click.UsageError(f"{option.opts[-1]} goes with a model of this process: give it to 'staticllm serve'")


def run(server: str, api_key: str | None, model: str | None, prompt: str | None, options: dict[str, Any]) -> None:
    """Answer ``prompt``, or chat if it is None.

    Raises:
        StaticLLMError: there is no server, or it refused.
    """
    with ServerClient(server, api_key) as client:
        remote = RemoteRun(client, model, options)
        if prompt is None:
            _check_there(client)
            remote.chat()
        else:
            remote.answer(prompt)


def _check_there(client: ServerClient) -> None:
    """Check before the first question that the server is there and takes the key.

    Raises:
        StaticLLMError: it does not.
    """
    client.objects("/v1/models", "data")


def _print_stats(found: dict[str, Any]) -> None:
    ttft = "-" if found["ttft_ms"] is None else f"{found['ttft_ms']:.1f} ms"
    click.echo(
        f"{found['prompt_tokens']} prompt tokens ({found['cached_tokens']} cached), {found['generated_tokens']} generated "
        f"({found['finish_reason']}) | TTFT {ttft} | total {found['total_ms'] / 1e3:.2f} s",
        err=True,
    )
