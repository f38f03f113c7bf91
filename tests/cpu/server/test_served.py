"""Tests that a thread may ask a model of the server for anything while the event loop unloads it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from staticllm.core import ProgressEvent
from staticllm.errors import ClosedError
from staticllm.pipelines.llm_pipeline import StaticLLMPipeline
from staticllm.server.metrics import ServerMetrics
from staticllm.server.models.served import UNLOADED, Loading, ReadyModel, ServedModel, demo_spec

ENGINE = SimpleNamespace(calls_after=lambda number: {"cursor": number})
PIPELINE = SimpleNamespace(engine=ENGINE)


class UnloadedMeanwhile(ServedModel):
    """A model that is unloaded after its state was read once."""

    @property
    def state(self):
        state = self._state
        self._state = UNLOADED
        return state

    @state.setter
    def state(self, state):
        self._state = state


def model_in(state):
    model = UnloadedMeanwhile(demo_spec())
    model.become(state)
    return model


def loaded(home=None):
    return ReadyModel(model_in(UNLOADED).kind, PIPELINE, SimpleNamespace(), 4, home)


@pytest.mark.parametrize(
    ("name", "of_loaded", "of_unloaded"),
    [
        ("is_ready", True, False),
        ("is_lost", False, False),
        ("pipeline", PIPELINE, None),
        ("home", None, None),
        ("admission", SimpleNamespace(), None),
        ("chat", PIPELINE, AssertionError),
        ("local_engine", ENGINE, AssertionError),
    ],
)
def test_what_is_read_of_a_model_is_of_one_moment(name, of_loaded, of_unloaded):
    model = model_in(loaded())
    assert getattr(model, name) == of_loaded
    if of_unloaded is AssertionError:
        with pytest.raises(AssertionError, match="it is not loaded"):
            getattr(model, name)
    else:
        assert getattr(model, name) == of_unloaded


def test_the_state_that_is_loaded_is_no_other_one():
    model = model_in(loaded())
    assert isinstance(model.loaded, ReadyModel)
    assert model.loaded is None


def test_the_last_part_of_loading_is_read_once():
    event = ProgressEvent("compile", 1, 2, 0.5)
    model = model_in(Loading(event))
    assert model.progress == event
    assert model.progress is None


@pytest.mark.parametrize("home", [None, SimpleNamespace(engine=ENGINE, is_lost=False)], ids=["here", "elsewhere"])
def test_the_calls_of_a_model_that_is_unloaded_are_a_closed_error(home):
    model = model_in(loaded(home))
    assert model.calls_after(3) == {"cursor": 3}
    with pytest.raises(ClosedError, match="the model is not loaded"):
        model.calls_after(3)


class ClosedPipeline(StaticLLMPipeline):
    """A pipeline in another process that was closed while its statistics were asked for."""

    def __init__(self):
        pass

    def stats(self):
        raise ClosedError("the pipeline is closed")


def test_metrics_leave_a_model_out_that_is_unloaded_meanwhile():
    model = ServedModel(demo_spec())
    model.become(ReadyModel(model.kind, ClosedPipeline(), SimpleNamespace(num_waiting=2), 4))
    text = ServerMetrics(lambda: [model]).text().decode()
    assert 'staticllm_waiting_requests{model="demo"} 2.0' in text
    assert "staticllm_kv_slots_in_use{" not in text
