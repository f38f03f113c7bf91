"""Keeps the prefix tree of Ray's router on the head node.

The router makes its tree an actor without a machine of its own, and waits for it without a limit of time: lost with another
machine, it would stop every request that comes after. It takes an actor of the same name if there is one.
"""

from __future__ import annotations

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTreeActor
from ray.serve._private.constants import SERVE_NAMESPACE
from ray.serve.handle import DeploymentHandle

ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:PrefixCacheAffinityRouter"
"""Ray's router for prefixes. Its public name, ``ray.serve.llm.request_router``, needs vLLM to be installed."""
HEAD_NODE = {"node:__internal_head__": 0.001}
"""A resource that only the head node has."""


def keep_tree_here(handle: DeploymentHandle) -> None:
    """Make the tree for the requests of this deployment, unless it exists. The first request would make it anywhere."""
    namespace = "::".join([SERVE_NAMESPACE, handle.app_name, handle.deployment_name])
    PrefixTreeActor.options(
        name="LlmPrefixTreeActor",
        namespace=namespace,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        resources=HEAD_NODE,
    ).remote()
