"""The fraction of a load: it grows with each event, whatever the stages, and is 1 when the model can serve."""

import random
import threading
from itertools import pairwise

import pytest

from staticllm.core import ProgressEvent
from staticllm.system.load_progress import LoadProgress

STAGES = ("download", "convert", "read", "passes", "compile", "warm-up", "export")


def parts_of(stage, rng):
    """Return the events of a stage as it tells them: announced, while it runs, and done."""
    total = rng.randint(1, 9)
    for index in range(1, total + 1):
        if rng.random() < 0.5:
            yield ProgressEvent(stage, index, total, 0.0, is_done=False)
        seconds = sorted(rng.uniform(0, 30) for _ in range(rng.randint(0, 4)))
        yield from (ProgressEvent(stage, index, total, each, is_done=False, part=each / (each + 5)) for each in seconds)
        yield ProgressEvent(stage, index, total, 30.0)


def loads(rng):
    """Return the events of a load of one to three models, some of which need other devices than the first."""
    num_loads = rng.randint(1, 3)
    events = []
    for _ in range(num_loads + rng.choice((0, 0, 1, 2))):
        first = rng.randrange(len(STAGES) - 1)
        for stage in STAGES[first:]:
            if rng.random() < 0.8 or stage == "warm-up":
                events.extend(parts_of("import" if stage == "compile" and rng.random() < 0.3 else stage, rng))
    return num_loads, events


@pytest.mark.parametrize("seed", range(300))
def test_fractions_grow_to_one(seed):
    num_loads, events = loads(random.Random(seed))
    told = []
    shown = LoadProgress(told.append, num_loads)
    for event in events:
        shown(event)
    shown(ProgressEvent("ready", 1, 1, 1.0))
    shown.finish()
    assert [event.stage for event in told] == [event.stage for event in events] + ["ready"]
    fractions = [event.fraction for event in told]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1 and fractions[-2] < 1
    for before, after in pairwise(told):
        same = (before.stage, before.index, before.total) == (after.stage, after.index, after.total)
        if same and after.part > before.part and not after.is_done:
            assert after.fraction > before.fraction, (before, after)


def test_ready_waits_for_the_last_model():
    told = []
    shown = LoadProgress(told.append, num_loads=2)
    ready = ProgressEvent("ready", 1, 1, 3.0)
    shown(ProgressEvent("read", 1, 1, 0.1))
    shown(ProgressEvent("passes", 1, 1, 0.1))
    shown(ready)
    shown(ProgressEvent("read", 1, 1, 0.1))
    assert [event.stage for event in told] == ["read", "passes", "read"]
    assert told[0].fraction < told[1].fraction < told[2].fraction < 1
    shown.finish()
    assert (told[-1].stage, told[-1].fraction) == ("ready", 1)


def test_events_of_other_threads_do_not_count():
    told = []
    shown = LoadProgress(told.append, num_loads=1)
    shown(ProgressEvent("read", 1, 1, 0.1))
    thread = threading.Thread(target=shown, args=[ProgressEvent("compile", 1, 1, 9.0)])
    thread.start()
    thread.join()
    assert told[1].fraction == told[0].fraction


def test_nobody_need_listen():
    LoadProgress(None)(ProgressEvent("read", 1, 1, 0.1))
