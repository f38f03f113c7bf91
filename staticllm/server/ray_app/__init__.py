"""The server on many machines, as an application of Ray Serve: ``serve run staticllm.server.ray_app:app models=...``.

``app`` needs the extra ``cluster``; what it is made of is imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from staticllm.server.ray_app.application import application as app
    from staticllm.server.ray_app.cluster_settings import ClusterSettings

__all__ = ["ClusterSettings", "app"]


def __getattr__(name: str) -> Any:
    if name == "app":
        from staticllm.server.ray_app.application import application

        return application
    if name == "ClusterSettings":
        from staticllm.server.ray_app.cluster_settings import ClusterSettings

        return ClusterSettings
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
