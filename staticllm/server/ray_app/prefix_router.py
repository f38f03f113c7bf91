"""Ray's router for prefixes, with what it needs to outlive a lost machine.

It sends requests with the same beginning to the same replica, as long as the queues are about equally long, and looks at queues
only otherwise. Two things of Ray 2.60 would stop every request after the loss of a machine, and are mended here: its prefix tree
is an actor that may run on any machine, and replicas that have gone come back into the tree with requests on their way.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTreeActor
from ray.serve._private.constants import SERVE_NAMESPACE
from ray.serve.handle import DeploymentHandle

ROUTER = f"{__name__}:PrefixRouter"
HEAD_NODE = {"node:__internal_head__": 0.001}
"""A resource that only the head node has."""


class PrefixRouter(PrefixCacheAffinityRouter):  # type: ignore[misc]
    """Ray's router, which chooses by queues where its tree names a replica that has gone.

    Its public name, ``ray.serve.llm.request_router``, needs vLLM to be installed.
    """

    async def _prefix_match_best_replicas(self, pending_request: Any, candidate_replicas: Any) -> Any:
        try:
            return await super()._prefix_match_best_replicas(pending_request, candidate_replicas)
        except KeyError as error:
            self._tree_actor.remove_tenants.remote([error.args[0].to_full_id_str()])
            return [[]]


def keep_tree_here(handle: DeploymentHandle) -> None:
    """Make the tree for the requests of this deployment on the head node, unless it exists. The router takes it by its name."""
    namespace = "::".join([SERVE_NAMESPACE, handle.app_name, handle.deployment_name])
    PrefixTreeActor.options(
        name="LlmPrefixTreeActor",
        namespace=namespace,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        resources=HEAD_NODE,
    ).remote()
