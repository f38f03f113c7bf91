"""Makes the application of Ray Serve: an ingress, and a deployment for each kind of model."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from staticllm.server.ray_app.cluster_settings import ClusterSettings
from staticllm.server.ray_app.ingress import Ingress
from staticllm.server.ray_app.prefix_router import HEAD_NODE, ROUTER
from staticllm.server.ray_app.replica import Replica

MAX_ONGOING = 256
"""Requests in one replica, running or waiting; its server refuses what is too much for a model."""


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
