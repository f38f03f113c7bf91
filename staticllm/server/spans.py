"""Spans of OpenTelemetry with the attributes of its conventions for generative models (``gen_ai.*``)."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opentelemetry import propagate
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from starlette.datastructures import Headers

from staticllm.server.telemetry import OPERATIONS, HttpRecord

PROVIDER = "staticllm"
FAILED = 500
_NAMES = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "seed": "seed", "stream": "stream",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty", "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens", "num_predict": "max_tokens",
    "n": "choice.count",
}  # fmt: skip
"""The attributes of parameters, after ``gen_ai.request.``."""


class Spans:
    """Makes a span for each request that uses a model, below that of its client if it sent one (``traceparent``).

    ``provider`` makes and exports them; it is shut down at the end.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("staticllm.server")

    def begin(self, record: HttpRecord, headers: Headers) -> Callable[[], None]:
        """Start the span of a request, and return the function that ends it."""
        operation = OPERATIONS.get(record.path)
        if operation is None:
            return lambda: None
        span = self._tracer.start_span(
            operation,
            propagate.extract(dict(headers)),
            SpanKind.SERVER,
            {"gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER, "url.path": record.path},
            start_time=int(record.began_at * 1e9),
        )

        def end() -> None:
            if record.model is not None:
                span.update_name(f"{operation} {record.model}")
            span.set_attributes(attributes_of(record))
            if record.status >= FAILED or record.error is not None:
                span.set_status(Status(StatusCode.ERROR if record.status >= FAILED else StatusCode.UNSET))
                span.set_attribute("error.type", record.error or str(record.status))
            span.end()

        return end

    def close(self) -> None:
        self._provider.shutdown()


def attributes_of(record: HttpRecord) -> dict[str, Any]:
    """Return the attributes of a request that has ended. There is no text of prompts or answers among them."""
    found: dict[str, Any] = {"http.request.method": record.method, "http.response.status_code": record.status}
    for name, value in record.parameters.items():
        if name == "dimensions":
            found["gen_ai.embeddings.dimension.count"] = value
        elif name in _NAMES and not (name == "n" and value == 1):
            found[f"gen_ai.request.{_NAMES[name]}"] = value
    if record.model is not None:
        found["gen_ai.request.model"] = record.model
        found["gen_ai.response.model"] = found["gen_ai.request.model"]
    if record.session is not None:
        found["gen_ai.conversation.id"] = record.session
    if record.prompt_tokens:
        found["gen_ai.usage.input_tokens"] = record.prompt_tokens
        found["gen_ai.usage.cache_read.input_tokens"] = record.cached_tokens
    if record.finish_reasons:
        found["gen_ai.usage.output_tokens"] = record.output_tokens
        found["gen_ai.response.finish_reasons"] = record.finish_reasons
    if record.first_token is not None:
        found["gen_ai.response.time_to_first_chunk"] = record.first_token - record.began
    return found


def otlp_spans() -> Spans:
    """Return spans that are sent as OTLP over HTTP, to where OpenTelemetry's variables say (``OTEL_EXPORTER_OTLP_ENDPOINT`` …).

    Raises:
        ModuleNotFoundError: the exporter is not installed.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: PROVIDER}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Spans(provider)
