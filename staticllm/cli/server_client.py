"""A client of a server, for the commands: every failure is one line."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from staticllm.cli.options import options_of, value
from staticllm.cli.terminal import cell
from staticllm.errors import ConfigError, StaticLLMError

if TYPE_CHECKING:
    import httpx

SERVER_VARIABLE, KEY_VARIABLE = "STATICLLM_SERVER", "STATICLLM_API_KEY"
DEFAULT_SERVER = "http://127.0.0.1:8000"
CONNECT_SECONDS = 5.0
GET_SECONDS = 30.0
ANSWER_SECONDS = 600.0
"""The longest silence within an answer; a server that loads a model sends comments only in streams."""
MAX_ANSWER = 64 << 20
"""Bytes of an answer that is no stream."""
Command = TypeVar("Command", bound=Callable[..., Any])


class ServerError(StaticLLMError):
    """A server that is not there, or that refused a request."""

    status: int
    """0 without an answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


server_option = value(
    "--server", None, f"URL of the server.  [${SERVER_VARIABLE}, else {DEFAULT_SERVER}]", metavar="URL"
)
api_key_option = value("--api-key", None, f"Key of the server.  [${KEY_VARIABLE}]", metavar="KEY")


def server_options(command: Command) -> Command:
    """Add ``--server`` and ``--api-key``, and pass a ``ServerClient``, which is closed at the end."""

    @wraps(command)
    def with_client(*arguments: Any, server: str | None, api_key: str | None, **options: Any) -> Any:
        with ServerClient(server, api_key) as client:
            return command(*arguments, client=client, **options)

    return cast(Command, options_of(server_option, api_key_option)(with_client))


class ServerClient:
    """Sends requests to one server. ``url``: with or without ``http://`` and ``/v1``; None takes the environment's.

    All requests raise a ``ServerError`` if there is no server, it refuses, or it answers something that is not ours.

    Raises:
        ConfigError: the URL or the key is impossible, or a package is missing.
    """

    def __init__(self, url: str | None, key: str | None) -> None:
        try:
            import httpx
        except ModuleNotFoundError as error:
            raise ConfigError(f'{error.name} is not installed: pip install "staticllm[server]"') from None
        given = url or os.environ.get(SERVER_VARIABLE) or DEFAULT_SERVER
        full = given if "://" in given else f"http://{given}"
        self.url = full.rstrip("/").removesuffix("/v1").rstrip("/")
        key = key or os.environ.get(KEY_VARIABLE) or ""
        if not key.isascii() or not key.isprintable():
            raise ConfigError("the API key has characters outside ASCII: check --api-key")
        try:
            parsed = httpx.URL(self.url)
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError(f"{given!r} is no URL of a server: {error}") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"{given!r} is no URL of a server: give one like {DEFAULT_SERVER}")
        self._short = httpx.Timeout(GET_SECONDS, connect=CONNECT_SECONDS)
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
            trust_env=False,  # a proxy of the environment is not for a server of this machine
        )

    def get(self, path: str, **query: str | int) -> dict[str, Any]:
        """Return the JSON object that ``GET path`` answers."""
        with self._failures(), self._http.stream("GET", path, params=query, timeout=self._short) as response:
            found = self._json(response, GET_SECONDS)
        if not isinstance(found, dict):
            raise self.foreign()
        return found

    def objects(self, path: str, name: str) -> list[dict[str, Any]]:
        """Return the list ``name`` of objects in what ``GET path`` answers."""
        found = self.get(path).get(name)
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
            raise self.foreign()
        return found

    def post(self, path: str, body: object) -> Any:
        """Return the JSON that ``POST path`` answers."""
        with self._failures(), self._http.stream("POST", path, json=body) as response:
            return self._json(response, ANSWER_SECONDS)

    def foreign(self, status: int = 0) -> ServerError:
        """Return the error of an answer that is not ours."""
        return ServerError(f"what answers at {self.url} is no server of 'staticllm serve'", status)

    @contextmanager
    def stream(self, path: str, body: object) -> Iterator[Iterator[dict[str, Any]]]:
        """Post a body whose answer is a stream of events, and yield their JSON. Leaving the block ends the answer."""
        from httpx_sse import connect_sse

        with self._failures(), connect_sse(self._http, "POST", path, json=body) as events:
            if events.response.status_code != 200:
                self._json(events.response, GET_SECONDS)
            yield self._events(events)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _events(self, events: Any) -> Iterator[dict[str, Any]]:
        is_done = False
        with self._failures():
            for event in events.iter_sse():
                if event.data == "[DONE]":
                    is_done = True
                    continue
                found = json.loads(event.data)
                if not _is_event(found):
                    raise self.foreign()
                if "error" in found:
                    raise ServerError(_message_of(found))
                yield found
        if not is_done:
            raise ServerError(f"the server at {self.url} ended the answer in its middle: send it again")

    def _json(self, response: httpx.Response, seconds: float) -> Any:
        """Read an answer within a time and a size, and return its JSON."""
        status = response.status_code
        until = time.monotonic() + seconds
        data = bytearray()
        for part in response.iter_bytes():
            data += part
            if len(data) > MAX_ANSWER or time.monotonic() > until:
                raise ServerError(f"the answer of the server at {self.url} does not end", status)
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            found = None
        if status == 401:
            raise ServerError(f"the server at {self.url} refuses the key: give --api-key or set {KEY_VARIABLE}", status)
        if status >= 400:
            message = (
                _message_of(found) or f"it is no server of 'staticllm serve' (status {status} for {response.url.path})"
            )
            raise ServerError(f"the server at {self.url}: {message}", status)
        if found is None:
            raise self.foreign(status)
        return found

    @contextmanager
    def _failures(self) -> Iterator[None]:
        import httpx

        try:
            yield
        except httpx.ConnectError:
            raise ServerError(
                f"there is no server at {self.url}: start one with 'staticllm serve', or give --server"
            ) from None
        except httpx.TimeoutException:
            raise ServerError(f"the server at {self.url} does not answer") from None
        except (httpx.HTTPError, json.JSONDecodeError, RecursionError) as error:
            text = cell(error) or type(error).__name__
            raise ServerError(f"the answer of the server at {self.url} cannot be read: {text}") from None


def _message_of(found: Any) -> str:
    """Return the message of an error in OpenAI's form or in Ollama's; empty if it is neither."""
    error = found.get("error") if isinstance(found, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return cell(message) if isinstance(message, str) else ""


def _is_event(found: Any) -> bool:
    """Return whether a value has the form of a chunk, as far as it is read."""
    if not isinstance(found, dict):
        return False
    choices = found.get("choices") or []
    usage = found.get("usage") or {}
    if not isinstance(choices, list) or not isinstance(usage, dict):
        return False
    return isinstance(usage.get("prompt_tokens_details") or {}, dict) and all(map(_is_choice, choices))


def _is_choice(choice: Any) -> bool:
    delta = isinstance(choice, dict) and (choice.get("delta") or {})
    if not isinstance(delta, dict):
        return False
    return all(text is None or isinstance(text, str) for text in (choice.get("text"), delta.get("content")))
