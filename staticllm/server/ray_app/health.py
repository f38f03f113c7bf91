"""Tells a device that fails every call from one that serves."""

from __future__ import annotations

from collections.abc import Iterable

from staticllm.pipelines.llm_pipeline import StaticLLMPipeline
from staticllm.server.served_model import ServedModel

MAX_BAD_CHECKS = 2
"""Checks in a row in which calls failed and none succeeded: a single bad request fails calls, too."""


class DeviceWatch:
    """Compares the counts of device calls from check to check."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, int]] = {}
        self._num_bad: dict[str, int] = {}

    def failing(self, models: Iterable[ServedModel]) -> str | None:
        """Return the name of a loaded model whose device fails every call, or None. Call it every few seconds."""
        for model in models:
            if not isinstance(model.pipeline, StaticLLMPipeline):
                continue
            stats, name = model.pipeline.stats(), model.spec.name
            if self._is_bad(name, stats.num_failed_steps, stats.num_steps - stats.num_failed_steps):
                return name
        return None

    def _is_bad(self, name: str, num_failed: int, num_good: int) -> bool:
        old_failed, old_good = self._counts.get(name, (0, 0))
        self._counts[name] = num_failed, num_good
        if num_good != old_good:  # also after the model was loaded again, and counts from zero
            self._num_bad[name] = 0
        elif num_failed > old_failed:
            self._num_bad[name] = self._num_bad.get(name, 0) + 1
        return self._num_bad.get(name, 0) >= MAX_BAD_CHECKS
