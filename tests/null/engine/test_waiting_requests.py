"""Tests what counts as a waiting request: a request counts once, however many answers or beams it has."""

import pytest
from support.engine.beam_steps import beam_request

from staticllm.core import Variant
from staticllm.errors import BusyError, StaticLLMError
from staticllm.pipelines.engine.client_sequences.sequence import ClientSequence, Feed
from staticllm.pipelines.engine.request import Finished, TokenOutput
from staticllm.pipelines.engine.state import RequestState
from staticllm.pipelines.scheduling.interface import RequestStatus
from staticllm.pipelines.scheduling.planner import make_policy
from staticllm.testing import assert_empty, fake_engine, fake_request, run_to_end

SCARCE = [
    *(Variant(rows, 128, rows) for rows in (1, 4, 16)),
    *(Variant(32, kv_len, count) for kv_len in (0, 128) for count in (1, 16)),
]


def engine_of(max_waiting):
    return fake_engine(
        make_policy("dynamic"), 16, SCARCE, 100, host_kv_slots=0, max_waiting=max_waiting, starts_thread=False
    )


@pytest.mark.parametrize(
    "request_of",
    [
        lambda: beam_request(range(60), 30, 64, 1),
        lambda: fake_request(range(20), 30, num_sequences=16),
    ],
)
def test_a_request_whose_sequences_lose_their_slots_does_not_count_again(request_of):
    """Each of them counted, so that other requests were refused."""
    engine, most = engine_of(2), 0
    engine.steps.add([request_of()])
    engine.steps.take()
    assert engine.core.num_waiting == 1
    while not engine.is_idle:
        engine.steps.step()
        most = max(most, engine.core.device.table.count(RequestStatus.WAITING))
        assert engine.core.num_waiting == 0
    assert most > 2, "slots were too many for this test"
    assert_empty(engine)


def test_feeds_that_wait_do_not_count():
    engine = engine_of(2)
    sequences = [ClientSequence(engine) for _ in range(5)]
    results = []
    engine.feed([Feed(sequence, range(30), results.append, "last") for sequence in sequences])
    engine.steps.take()
    engine.steps.callbacks.run()
    assert engine.core.device.table.count(RequestStatus.WAITING) == 5
    engine.steps.take()
    assert engine.core.num_waiting == 0
    engine.submit_state(fake_request(range(5), 3))
    run_to_end(engine)
    assert all(result.error is None for result in results)


def submit_after(engine, first):
    """Submit another request with the first output of ``first``, before the engine does anything else; return a list with it."""
    more = []

    def listen(_):
        if not more:
            request = fake_request(range(5), 3)
            engine.submit_state(request)
            more.append(request)

    first.queue.add_listener(listen)
    return more


@pytest.mark.parametrize("num_new", [30, 1])
def test_a_request_does_not_count_once_its_first_token_can_be_read(num_new):
    engine, first = engine_of(1), fake_request(range(20), num_new)
    more = submit_after(engine, first)
    engine.submit_state(first)
    run_to_end(engine)
    assert [len(each.tokens) for each in more] == [5 + 3]
    assert_empty(engine)


@pytest.mark.parametrize(
    "first_of",
    [
        lambda: fake_request(range(20), 30),
        lambda: fake_request(range(20), 30, num_sequences=4),
        lambda: beam_request(range(60), 30, 8, 2),
    ],
)
def test_requests_that_end_before_they_begin_do_not_count(first_of):
    """The engine is idle afterwards: what it counted at the beginning of its last step would hold for good."""
    engine, first, other = engine_of(2), first_of(), fake_request(range(7), 3)
    more = submit_after(engine, first)
    for each in (first, other):
        engine.submit_state(each)
    engine.steps.take()
    with pytest.raises(BusyError, match="2 requests wait"):
        engine.submit_state(fake_request(range(6), 3))
    first.cancel()
    engine.core.end_expired()
    assert len(more) == 1, "the other one still waits, and there is room for one"
    other.cancel()
    more[0].cancel()
    engine.steps.step()
    engine.submit_state(fake_request(range(6), 3))
    run_to_end(engine)
    assert_empty(engine)


def test_a_request_whose_last_token_cannot_be_handed_over_still_ends():
    """It no longer counts while its end is posted; if that fails, its reader must not wait forever."""
    engine, request = engine_of(1), fake_request(range(20), 1)
    outputs = []

    def fail_once(output):
        outputs.append(output)
        if len(outputs) == 1:
            raise RuntimeError("a listener failed")

    request.queue.add_listener(fail_once)
    engine.submit_state(request)
    engine.steps.step()
    assert [type(output) for output in outputs] == [TokenOutput, Finished]
    engine.submit_state(fake_request(range(6), 3))
    run_to_end(engine)
    assert_empty(engine)


def test_a_token_that_a_listener_failed_at_is_handed_over_once():
    engine, request = engine_of(1), fake_request(range(20), 5)
    outputs = []

    def fail_once(output):
        if not outputs:
            outputs.append(output)
            raise RuntimeError("a listener failed")

    request.queue.add_listener(fail_once)
    engine.submit_state(request)
    engine.steps.step()
    found = [request.queue.get(timeout=1) for _ in range(2)]
    assert [type(output) for output in found] == [TokenOutput, Finished], "the token is in the queue, and then the end"
    assert isinstance(found[1].error, StaticLLMError)
    engine.submit_state(fake_request(range(6), 3))
    run_to_end(engine)
    assert_empty(engine)


@pytest.mark.parametrize("request_of", [lambda: fake_request(range(20), 5), lambda: beam_request(range(60), 5, 4, 1)])
def test_the_reader_of_an_error_can_submit_at_once(request_of, monkeypatch):
    """Also if the core gives a request up in a state that an exception left."""
    engine, request = engine_of(1), request_of()
    more = submit_after(engine, request)
    engine.submit_state(request)
    engine.steps.take()
    with monkeypatch.context() as patch:
        patch.setattr(engine.core, "step", lambda: 1 / 0)
        patch.setattr(engine.core, "end_all", lambda *_: 1 / 0)
        engine.steps.step()
    run_to_end(engine)
    assert [len(each.tokens) for each in more] == [5 + 3]


def test_a_submission_counts_those_that_wait_only_if_they_may_be_too_many(monkeypatch):
    """Each counted all, under the lock that the engine's thread needs for its next step."""
    engine, counted = engine_of(50), []
    monkeypatch.setattr(RequestState, "is_waiting", property(lambda _: counted.append(1) or True))
    for number in range(49):
        engine.submit_state(fake_request(range(5), 3))
        if number % 8 == 0:
            engine.steps.take()
    assert not counted
    engine.submit_state(fake_request(range(5), 3))
    with pytest.raises(BusyError, match="50 requests wait, MAX_WAITING is 50"):
        engine.submit_state(fake_request(range(5), 3))
    monkeypatch.undo()
    run_to_end(engine)
    assert_empty(engine)


def test_searches_that_have_not_begun_count():
    engine = engine_of(2)
    for _ in range(2):
        engine.submit_state(beam_request(range(20), 4, 8, 1))
    for _ in range(2):
        with pytest.raises(BusyError, match="2 requests wait, MAX_WAITING is 2"):
            engine.submit_state(fake_request(range(5), 3))
        engine.steps.take()  # they wait in the core now
        engine.steps.take()
    run_to_end(engine)
    assert_empty(engine)
