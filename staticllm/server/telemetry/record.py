"""What is known about a request at its end. It has no text of prompts or answers."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from staticllm.pipelines.text.output_processor import RequestOutput

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/api/chat": "chat",
    "/v1/completions": "text_completion",
    "/api/generate": "text_completion",
    "/v1/embeddings": "embeddings",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/rerank": "rerank",
}
"""What the endpoints that use a model do, in the words of OpenTelemetry's conventions, where they have one."""
MAX_PATH = 200
PARAMETERS = ("temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty", "max_tokens",
              "max_completion_tokens", "max_output_tokens", "num_predict", "stream", "n", "dimensions")  # fmt: skip


@dataclass
class RequestRecord:
    """One HTTP request. Moments are those of ``time.perf_counter``, ``began_at`` is in seconds since 1970.

    ``session`` is what the client said in ``x-session-affinity``. ``parameters`` are those of ``PARAMETERS`` that it gave. Tokens
    are the sums of all answers. ``is_disconnected``: the client closed the connection before the end.
    """

    method: str
    path: str
    client: str = ""
    session: str | None = None
    began: float = field(default_factory=time.perf_counter)
    began_at: float = field(default_factory=time.time)
    status: int = 0
    num_bytes: int = 0
    model: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    is_disconnected: bool = False
    error: str | None = None

    def note_parameters(self, body: object) -> None:
        """Take over what a body says about its answers; of Ollama's bodies also from their options."""
        for given in (body, getattr(body, "options", None)):
            found = {name: getattr(given, name, None) for name in PARAMETERS}
            self.parameters |= {name: value for name, value in found.items() if value is not None}

    def note_token(self) -> None:
        """Take the moment of the first token."""
        if self.first_token is None:
            self.first_token = time.perf_counter()

    def note_outputs(self, outputs: list[RequestOutput]) -> None:
        """Add the answers of one handle."""
        self.prompt_tokens += outputs[0].metrics.get_num_input_tokens()
        self.cached_tokens += outputs[0].num_cached
        self.output_tokens += sum(len(output.token_times) for output in outputs)
        self.finish_reasons += [str(output.finish_reason.value) for output in outputs]


_CURRENT: ContextVar[RequestRecord | None] = ContextVar("staticllm_request", default=None)


def current_record() -> RequestRecord:
    """Return the record of the request that this task belongs to; outside of one, a new record that is not read."""
    found = _CURRENT.get()
    return RequestRecord("", "") if found is None else found


def set_current(record: RequestRecord) -> None:
    """Make a record that of the calling task, and of the tasks that it starts."""
    _CURRENT.set(record)
