"""Runs the application on a cluster until a signal ends it: `staticllm serve --ray`."""

# pyright: reportMissingImports=false
from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import ray
from pydantic import ValidationError
from ray import serve

from staticllm.errors import ConfigError
from staticllm.server.process import base_url, listen
from staticllm.server.ray_app.application import application
from staticllm.server.ray_app.cluster_settings import ClusterSettings

APPLICATION = "staticllm"
CONNECT_SECONDS = 5.0


def settings_of(values: dict[str, Any]) -> ClusterSettings:
    """Return checked settings.

    Raises:
        ConfigError: one is unknown or impossible.
    """
    try:
        return ClusterSettings(**values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{where}: {message}" if where else message) from None


def serve_on_cluster(
    settings: ClusterSettings, address: str | None, port: int, on_listening: Callable[[str], object] = lambda url: None
) -> None:
    """Serve until a signal (SIGTERM, SIGINT). ``on_listening`` gets the URL.

    Args:
        settings: What is served, and how it is spread.
        address: The address of the cluster, or ``auto`` for the one that this machine is part of; None makes a cluster of this
            machine alone, which ends with the call.
        port: The port of the proxy on the head node; 0 takes a free one.
        on_listening: Called with the URL once replicas serve.

    Raises:
        ConfigError: the cluster is not there, the address is in use, or the settings are not safe.
        StaticLLMError: a model is missing on this machine.
    """
    served = application(settings)
    url, port = _free_address(settings, port)
    with _cluster(address), _signals() as is_ended:
        serve.start(proxy_location="HeadOnly", http_options={"host": settings.host, "port": port})
        try:
            serve.run(served, name=APPLICATION)
            on_listening(url)
            is_ended.wait()
        finally:
            serve.delete(APPLICATION)
            if address is None:
                serve.shutdown()


def _free_address(settings: ClusterSettings, port: int) -> tuple[str, int]:
    """Return the URL and the port of an address that is free now. Raises ``ConfigError`` if the address cannot be used."""
    from dataclasses import replace

    with listen(replace(settings.of_replica(), port=port)) as listener:
        return base_url(listener), int(listener.getsockname()[1])


def _check_address(address: str) -> None:
    """Check that something listens there: Ray itself waits for minutes. Raises ``ConfigError`` if nothing does."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if address == "auto":
        return
    try:
        if not port.isdecimal():
            raise OSError("it is not HOST:PORT")
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"no Ray cluster at {address!r}: {error}; start one with `ray start --head`") from None


@contextmanager
def _cluster(address: str | None) -> Any:
    if address is not None:
        _check_address(address)
    try:
        ray.init(address=address or "local", logging_level=logging.WARNING, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"no Ray cluster at {address!r}: {str(error).splitlines()[0]}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _signals() -> AbstractContextManager[threading.Event]:
    if threading.current_thread() is not threading.main_thread():
        return nullcontext(threading.Event())
    return _main_signals()


@contextmanager
def _main_signals() -> Any:
    is_ended = threading.Event()
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: is_ended.set()) for number in numbers]
    try:
        yield is_ended
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
