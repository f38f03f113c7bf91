"""Makes what takes the records of requests, as the settings say."""

from __future__ import annotations

from staticllm.errors import ConfigError
from staticllm.server.settings import ServerSettings
from staticllm.server.telemetry.access_log import AccessLog
from staticllm.server.telemetry.middleware import Sink


def make_sinks(settings: ServerSettings) -> list[Sink]:
    """Return the access log and the spans that the settings ask for.

    Raises:
        ConfigError: the log cannot be written, or OpenTelemetry is not installed.
    """
    sinks: list[Sink] = []
    if settings.has_spans:
        try:
            from staticllm.server.telemetry.spans import otlp_spans

            sinks.append(otlp_spans())
        except ModuleNotFoundError as error:
            raise ConfigError(f"--otel: {error.name} is not installed: pip install 'staticllm[otel]'") from None
    if settings.access_log is not None:
        sinks.append(AccessLog(settings.access_log))
    return sinks
