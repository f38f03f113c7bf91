"""Makes the application of Ray Serve: an ingress, and a deployment for each kind of model; and runs it until a signal ends it."""

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
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from staticllm.errors import ConfigError
from staticllm.server.process import base_url, listen
from staticllm.server.ray_app.cluster_settings import ClusterSettings
from staticllm.server.ray_app.ingress import Ingress
from staticllm.server.ray_app.prefix_router import HEAD_NODE, ROUTER
from staticllm.server.ray_app.replica import Replica

MAX_ONGOING = 256
"""Requests in one replica, running or waiting; its server refuses what is too much for a model."""
APPLICATION = "staticllm"
CONNECT_SECONDS = 5.0


def application(args: ClusterSettings) -> serve.Application:
    """Return the application. ``serve run staticllm.server.ray_app:app models=/path/a,/path/b max_replicas=3`` calls it.

    Raises:
        StaticLLMError: a model is missing on this machine, or the settings are not safe.
    """
    args.of_replica()
    specs = args.specs()
    groups = {"chat" if spec.kind == "chat" else "encoder" for spec in specs}
    handles = {group: _deployment(group, args).bind(specs, args) for group in sorted(groups)}
    ingress = serve.deployment(Ingress).options(
        name="ingress",
        num_replicas=1,
        max_ongoing_requests=args.max_queued * 4,
        ray_actor_options={"num_cpus": 0, "resources": HEAD_NODE},
        graceful_shutdown_timeout_s=args.grace,
    )
    return ingress.bind(specs, args, handles)


def _deployment(group: str, settings: ClusterSettings) -> serve.Deployment:
    options: dict[str, Any] = {}
    if group == "chat" and settings.routing == "prefix":
        limits = {"imbalanced_threshold": settings.imbalance, "do_eviction": True}
        options["request_router_config"] = RequestRouterConfig(
            request_router_class=ROUTER, request_router_kwargs=limits
        )
    return serve.deployment(Replica).options(
        name=group,
        max_ongoing_requests=MAX_ONGOING,
        max_queued_requests=settings.max_queued,
        max_replicas_per_node=settings.max_replicas_per_node,
        autoscaling_config=AutoscalingConfig(
            min_replicas=settings.min_replicas,
            initial_replicas=settings.min_replicas,
            max_replicas=settings.max_replicas,
            target_ongoing_requests=settings.target_requests,
        ),
        ray_actor_options={"num_cpus": settings.num_cpus, "resources": settings.resources},
        health_check_period_s=5,
        graceful_shutdown_timeout_s=settings.grace,
        **options,
    )


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
    """Return the URL and the port of an address that is free now.

    Raises:
        ConfigError: the address cannot be used.
    """
    from dataclasses import replace

    with listen(replace(settings.of_replica(), port=port)) as listener:
        return base_url(listener), int(listener.getsockname()[1])


def _check_address(address: str) -> None:
    """Check that something listens there: Ray itself waits for minutes.

    Raises:
        ConfigError: nothing does.
    """
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
