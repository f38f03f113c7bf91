"""Tests that a hub releases the pipeline and the process of a model whose loading or end fails."""

from __future__ import annotations

import asyncio

import pytest

for package in ("fastapi", "uvicorn", "sse_starlette", "prometheus_client"):
    pytest.importorskip(package)

from staticllm.config import StaticLLMConfig  # noqa: E402
from staticllm.errors import ConfigError, StaticLLMError  # noqa: E402
from staticllm.server.models.admission import AdmissionLimits  # noqa: E402
from staticllm.server.models.hub import ModelHub  # noqa: E402
from staticllm.server.models.kinds import ChatKind  # noqa: E402
from staticllm.server.models.served import ModelSpec  # noqa: E402
from staticllm.server.settings import ServerSettings  # noqa: E402


class Home:
    """Stands for the process of a model."""

    def __init__(self, log):
        self._log = log
        self.is_lost = False

    def close(self):
        self._log.append("home")


class Pipeline:
    """Stands for a pipeline, whose end may fail."""

    config = StaticLLMConfig(programs="shared")

    def __init__(self, log, error=None):
        self._log = log
        self._error = error

    def close(self):
        self._log.append("pipeline")
        if self._error is not None:
            raise self._error


def run(monkeypatch, tmp_path, use, error=None):
    """Run ``use(hub, model)`` with a hub of one model in a process of its own; return what was closed, in order."""
    log = []
    monkeypatch.setattr(ChatKind, "has_files", lambda self, path: True)
    monkeypatch.setattr(ModelHub, "_home_of", lambda self, model: Home(log))

    async def main():
        models = ModelHub([ModelSpec("one", tmp_path, "chat")], ServerSettings(), lambda *_: Pipeline(log, error))
        try:
            await use(models, models.models["one"])
        finally:
            await models.close()

    asyncio.run(main())
    return log


@pytest.mark.parametrize(("owner", "name"), [(ChatKind, "num_seqs"), (AdmissionLimits, "of")])
def test_a_model_whose_limits_cannot_be_made_is_released(monkeypatch, tmp_path, owner, name):
    def refuse(*_):
        raise ConfigError("no such limit")

    monkeypatch.setattr(owner, name, refuse)

    async def use(models, model):
        with pytest.raises(ConfigError, match="no such limit"):
            await models.acquire(model)
        assert models.status(model) == "unloaded"

    assert run(monkeypatch, tmp_path, use) == ["pipeline", "home"]


def test_the_process_of_a_model_ends_also_if_the_end_of_its_pipeline_fails(monkeypatch, tmp_path):
    async def use(models, model):
        async with models.using(model):
            assert models.status(model) == "loaded"
        with pytest.raises(StaticLLMError, match="it hangs"):
            await models.unload("one")
        assert models.status(model) == "unloaded"

    assert run(monkeypatch, tmp_path, use, StaticLLMError("it hangs")) == ["pipeline", "home"]


def test_all_models_are_closed_if_the_end_of_one_fails(monkeypatch, tmp_path):
    logs = {name: [] for name in ("one", "two", "three")}
    errors = {"one": StaticLLMError("it hangs"), "two": StaticLLMError("it hangs, too")}
    monkeypatch.setattr(ChatKind, "has_files", lambda self, path: True)
    monkeypatch.setattr(ModelHub, "_home_of", lambda self, model: Home(logs[model.spec.name]))

    async def main():
        specs = [ModelSpec(name, tmp_path, "chat") for name in logs]
        models = ModelHub(specs, ServerSettings(), lambda spec, *_: Pipeline(logs[spec.name], errors.get(spec.name)))
        for model in models.models.values():
            await models.acquire(model)
        with pytest.raises(StaticLLMError, match=r"it hangs$"):
            await models.close()
        assert models.loaded == []

    asyncio.run(main())
    assert logs == {name: ["pipeline", "home"] for name in logs}
