"""The settings of a server on many machines: what `serve run` and a Serve config file give by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from staticllm.errors import ConfigError
from staticllm.server.models.served import ModelSpec, demo_spec, kind_of, model_spec
from staticllm.server.settings import ServerSettings


class ClusterSettings(BaseModel):
    """How an application is spread over the machines of a cluster.

    Attributes:
        models: The served models, ``NAME=PATH`` or ``PATH``, at the same path on each machine. Empty for the embedded model.
        device: The OpenVINO device of each machine, or several in their order (``NPU,GPU,CPU``).
        properties: The options of all models that know them.
        api_keys: The keys that clients may use.
        host: The address that Serve's proxies listen at; it decides whether requests may come without a key.
        is_insecure: Whether other machines may connect without a key.
        allowed_origins: Origins of web pages that may send requests.
        min_replicas, max_replicas: The bounds of the number of replicas of each kind (chat models; embedders and rerankers).
        target_requests: Requests per replica, running or waiting, above which Ray adds replicas.
        max_queued: Requests that wait for a replica; more are answered with status 503.
        models_per_replica: Models that a replica keeps loaded; the least recently used one is unloaded for another.
        num_cpus: CPUs that Ray reserves for a replica.
        resources: Other resources of a replica, by Ray's names (``{"NPU": 1}``).
        max_replicas_per_node: Replicas of each kind on one machine; one device serves one of them best.
        routing: ``prefix`` sends requests with the same beginning to the same replica, unless its queue is ``imbalance`` requests
            longer than another's; ``load`` looks at queues only.
        imbalance: See ``routing``.
        grace: Seconds that running answers have when a replica is replaced or stopped.
        max_body: Bytes of the body of a request.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    models: tuple[str, ...] = ()
    device: str = "CPU"
    properties: dict[str, Any] = Field(default_factory=dict)
    api_keys: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    is_insecure: bool = False
    allowed_origins: tuple[str, ...] = ()
    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(1, ge=1)
    target_requests: float = Field(8.0, gt=0)
    max_queued: int = Field(256, ge=1)
    models_per_replica: int = Field(2, ge=1)
    num_cpus: float = Field(1.0, ge=0)
    resources: dict[str, float] = Field(default_factory=dict)
    max_replicas_per_node: int = Field(1, ge=1)
    routing: Literal["prefix", "load"] = "prefix"
    imbalance: int = Field(8, ge=0)
    grace: float = Field(20.0, ge=0)
    max_body: int = Field(16 << 20, ge=1)

    @field_validator("models", "api_keys", "allowed_origins", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        """Take ``a,b`` for a list: `serve run` gives texts."""
        return tuple(part for part in value.split(",") if part) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> ClusterSettings:
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas {self.max_replicas} is less than min_replicas {self.min_replicas}: raise it, or lower min_replicas"
            )
        return self

    def specs(self) -> Sequence[ModelSpec]:
        """Return the served models.

        Raises:
            StaticLLMError: the directory of one is missing on this machine, holds no model, or one that a cluster does not serve.
        """
        found = [model_spec(model) for model in self.models] or [demo_spec()]
        if other := next((spec for spec in found if not kind_of(spec).runs_in_clusters), None):
            raise ConfigError(
                f"{other.name!r} is {kind_of(other).what}, which a cluster does not serve: serve it on one machine"
            )
        return found

    def of_replica(self) -> ServerSettings:
        """Return the settings of the server inside a replica.

        Raises:
            ConfigError: other machines could connect without a key.
        """
        settings = ServerSettings(
            host=self.host,
            api_keys=self.api_keys,
            allowed_origins=self.allowed_origins,
            is_insecure=self.is_insecure,
            device=self.device,
            properties=self.properties,
            max_body=self.max_body,
            grace=self.grace,
            is_lazy=True,
        )
        settings.check()
        return settings
