"""The metrics of a server for Prometheus: latencies, tokens, queues and refusals, and the statistics of its engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from staticllm.errors import ClosedError
from staticllm.pipelines.llm_pipeline import StaticLLMPipeline
from staticllm.pipelines.whisper_pipeline import StaticWhisperPipeline
from staticllm.server.models.served import ServedModel
from staticllm.server.models.tenants import TenantShares

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
Models = Callable[[], Iterable[ServedModel]]


class ServerMetrics:
    """The metrics of one server. ``models`` returns the loaded models; ``tenants`` has the device time of their clients."""

    def __init__(self, models: Models, tenants: TenantShares | None = None) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        seconds = partial(Histogram, labelnames=["model"], buckets=_SECONDS, registry=registry)
        counter = partial(Counter, registry=registry)
        self.ttft = seconds(
            "staticllm_time_to_first_token_seconds", "From the arrival of a request to its first token."
        )
        self.gap = seconds(
            "staticllm_inter_token_seconds",
            "Between two tokens of an answer, at the moments at which the model chose them.",
        )
        self.queue_time = seconds("staticllm_queue_seconds", "Time that a request waited for its turn in the server.")
        self.running = Gauge("staticllm_running_requests", "Answers that are in a model.", ["model"], registry=registry)
        self.prompt_tokens = counter("staticllm_prompt_tokens", "Tokens of prompts.", ["model"])
        self.output_tokens = counter("staticllm_output_tokens", "Generated tokens.", ["model"])
        self.cached_tokens = counter(
            "staticllm_cached_tokens", "Tokens of prompts that the prefix cache had.", ["model"]
        )
        self.audio_seconds = counter("staticllm_audio_seconds", "Seconds of sound that were transcribed.", ["model"])
        self.requests = counter("staticllm_http_requests", "Requests by path and status.", ["path", "status"])
        self.rejected = counter(
            "staticllm_rejected_requests",
            "Refused requests, by reason and the option of the server that would have helped.",
            ["reason", "knob"],
        )
        self.cancelled = counter("staticllm_cancelled_requests", "Requests whose client closed the connection.")
        registry.register(_Engines(models, TenantShares() if tenants is None else tenants))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format. Any thread may call."""
        return generate_latest(self._registry)

    def timer(self, model: str) -> AnswerTimer:
        """Return a timer for one answer of a model, which begins now."""
        return AnswerTimer(self, model)


class AnswerTimer:
    """Measures one answer: the time to its first token, and the gaps between its tokens."""

    def __init__(self, metrics: ServerMetrics, model: str) -> None:
        self._ttft = metrics.ttft.labels(model)
        self._gap = metrics.gap.labels(model)
        self._start = time.perf_counter()
        self._has_begun = False

    def begin(self) -> None:
        """Note that tokens have come now. Calls after the first do nothing."""
        if not self._has_begun:
            self._has_begun = True
            self._ttft.observe(time.perf_counter() - self._start)

    def end(self, token_times: Sequence[float]) -> None:
        """Note the end of the answer, with the moment at which each of its tokens was chosen, s.

        The moments at which tokens arrive here say nothing about gaps: fast ones arrive together.
        """
        for before, after in pairwise(token_times):
            self._gap.observe(after - before)


class _Engines(Collector):
    """Reads the statistics of each loaded model when metrics are asked for."""

    def __init__(self, models: Models, tenants: TenantShares) -> None:
        self._models = models
        self._tenants = tenants

    def collect(self) -> Iterable[Metric]:
        waiting = GaugeMetricFamily(
            "staticllm_waiting_requests", "Requests that wait for their turn.", labels=["model"]
        )
        slots = GaugeMetricFamily("staticllm_kv_slots_in_use", "KV slots in use after the last call.", labels=["model"])
        proactive = CounterMetricFamily(
            "staticllm_class_seconds", "Time of device calls by class of work.", labels=["model", "class"]
        )
        seconds = CounterMetricFamily(
            "staticllm_device_seconds", "Time of device calls by phase.", labels=["model", "phase"]
        )
        calls = CounterMetricFamily("staticllm_device_calls", "Device calls.", labels=["model", "result"])
        preemptions = CounterMetricFamily("staticllm_preemptions", "Preempted requests.", labels=["model"])
        jobs = CounterMetricFamily(
            "staticllm_device_jobs",
            "Calls of encoders and speech models in the engine of a chat model.",
            labels=["model"],
        )
        clients = CounterMetricFamily(
            "staticllm_client_seconds",
            "Device time of the clients in the config file, and of all others.",
            labels=["client"],
        )
        for client, spent in self._tenants.seconds.items():
            clients.add_metric([client], spent)
        models = list(self._models())
        for model in models:
            name = model.spec.name
            pipeline = model.pipeline
            admissions = model.admissions
            if admissions:
                waiting.add_metric([name], sum(each.num_waiting for each in admissions))
            if not isinstance(pipeline, (StaticLLMPipeline, StaticWhisperPipeline)):
                continue
            try:
                stats = pipeline.stats()
            except ClosedError:  # it is loaded again soon, or is being unloaded
                continue
            slots.add_metric([name], stats.slots_in_use)
            seconds.add_metric([name, "prefill"], stats.device_seconds * stats.prefill_share)
            seconds.add_metric([name, "decode"], stats.device_seconds * stats.decode_share)
            seconds.add_metric([name, "jobs"], stats.job_seconds)
            proactive.add_metric([name, "reactive"], stats.device_seconds - stats.proactive_seconds)
            proactive.add_metric([name, "proactive"], stats.proactive_seconds)
            jobs.add_metric([name], stats.num_jobs)
            calls.add_metric([name, "ok"], stats.num_steps - stats.num_failed_steps)
            calls.add_metric([name, "failed"], stats.num_failed_steps)
            preemptions.add_metric([name], stats.num_preemptions)
        return [waiting, slots, seconds, proactive, clients, calls, preemptions, jobs, *_of_encoders(models)]


def _of_encoders(models: Iterable[ServedModel]) -> list[Metric]:
    """Return the queues of texts of each device, and which engine the models share."""
    labels = ["model", "device"]
    embedded = CounterMetricFamily("staticllm_embedded_texts", "Texts by the device that ran them.", labels=labels)
    queued = GaugeMetricFamily(
        "staticllm_queued_texts", "Texts that wait for a device or run on it.", labels=[*labels, "state"]
    )
    depth = GaugeMetricFamily(
        "staticllm_queue_depth", "Most texts in the queue of a device, by WINDVE's policies.", labels=labels
    )
    shared = GaugeMetricFamily(
        "staticllm_shared_engine",
        "1 for an encoder or a speech model that runs in the engine of a chat model.",
        labels=["model", "engine"],
    )
    for model in models:
        name = model.spec.name
        for device in model.devices:
            embedded.add_metric([name, device.name], device.num_embedded)
            queued.add_metric([name, device.name, "waiting"], device.num_waiting)
            queued.add_metric([name, device.name, "running"], device.num_running)
            if device.depth:
                depth.add_metric([name, device.name], device.depth)
        if (owner := model.engine_owner) is not None:
            shared.add_metric([name, owner], 1)
    return [embedded, queued, depth, shared]
