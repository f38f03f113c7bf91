"""Joins the metrics of all replicas to one page, with a label that names the replica."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


class _Joined(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def joined(pages: Mapping[str, bytes]) -> bytes:
    """Return one page of metrics from those of each replica, in Prometheus' text format."""
    families: dict[str, Metric] = {}
    for replica, page in pages.items():
        for family in text_string_to_metric_families(page.decode()):
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                whole.samples.append(sample._replace(labels={"replica": replica, **sample.labels}))
    registry = CollectorRegistry()
    registry.register(_Joined(families.values()))
    return generate_latest(registry)
