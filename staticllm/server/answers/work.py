"""The class of a request's work: reactive if somebody waits for it, else proactive."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from staticllm.errors import shown
from staticllm.server.endpoint import ApiCall
from staticllm.server.http.errors import ApiError
from staticllm.server.models.served import ServedModel
from staticllm.server.settings import WORK_CLASSES

HEADER = "x-staticllm-class"
Tier = Literal["auto", "default", "flex"]
"""OpenAI's names: ``default`` is reactive and ``flex`` proactive; ``auto`` leaves it to what else says the class."""


class TierFields(BaseModel):
    """The field of OpenAI's API that says the class."""

    service_tier: Tier | None = None

    def tier_shown(self, is_proactive: bool) -> dict[str, str]:
        """Return the tier that an answer had, as a field of it; empty if the request did not name one."""
        return {} if self.service_tier is None else {"service_tier": "flex" if is_proactive else "default"}


def stated_class(call: ApiCall, model: ServedModel, tier: Tier | None = None) -> bool | None:
    """Return whether a request is proactive; None if nothing says its class.

    The first of these that says it decides: ``service_tier``, the header, the client's entry in the config file, the option
    ``WORK_CLASS`` of the model.

    Raises:
        ApiError: the header has another value.
    """
    values = set(map(str.lower, call.request.headers.getlist(HEADER)))
    given = ", ".join(sorted(values)) if values else None
    if given is not None and given not in WORK_CLASSES:
        raise ApiError(
            400,
            f"the header X-Staticllm-Class is {shown(given)}: must be reactive or proactive",
            param="X-Staticllm-Class",
            code="invalid_value",
        )
    if tier in ("default", "flex"):
        return tier == "flex"
    client = call.state.settings.client_of(call.client)
    for found in (given, None if client is None else client.work_class, model.spec.work_class):
        if found is not None:
            return found.lower() == "proactive"
    return None


def is_proactive(call: ApiCall, model: ServedModel, tier: Tier | None = None, priority: int = 0) -> bool:
    """Return whether a request for an answer is proactive: as stated, else if its priority is below 0.

    Raises:
        ApiError: as for ``stated_class``.
    """
    stated = stated_class(call, model, tier)
    return priority < 0 if stated is None else stated
