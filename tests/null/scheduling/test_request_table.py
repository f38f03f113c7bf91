"""The request table: which status may follow which, and when a view is made again."""

import pytest

from staticllm.pipelines.scheduling.interface import RequestStatus
from staticllm.pipelines.scheduling.request_table import TRANSITIONS, Limits, RequestInfo, RequestTable


def running():
    info = RequestInfo(1, 0.0, 3)
    info.add_computed(3)
    info.add_token(1.0, can_run=True)
    return info


def test_a_request_goes_through_its_life():
    info = RequestInfo(1, 0.0, 3)
    assert info.status == "waiting" and info.view.num_left == 3
    info.add_computed(2)
    assert info.status == "prefilling" and info.view.own_slots == 2
    info.add_computed(1)
    info.add_token(1.0, can_run=False)
    assert info.status == "swapped" and info.view.num_generated == 1 and info.view.in_arena
    info.leave_arena()
    info.swap_in(own_slots=3)
    assert info.status == "running" and info.view.own_slots == 3 and info.view.in_arena
    info.preempt()
    assert info.status == "waiting" and info.view.num_computed == 0 and info.view.num_left == 4


@pytest.mark.parametrize("status", list(RequestStatus))
@pytest.mark.parametrize("following", list(RequestStatus))
def test_only_legal_transitions_are_made(status, following):
    info = RequestInfo(1, 0.0, 3)
    info.status = status
    if following is status or following in TRANSITIONS[status]:
        info._move_to(following)
        assert info.status is following
    else:
        with pytest.raises(AssertionError, match=f"{status} -> {following}"):
            info._move_to(following)


def test_a_waiting_request_cannot_be_swapped_in_or_out():
    info = RequestInfo(1, 0.0, 3)
    for move in (info.swap_in, info.swap_out):
        with pytest.raises(AssertionError):
            move()


@pytest.mark.parametrize(
    "change",
    [
        lambda info: info.add_computed(1),
        lambda info: info.add_token(2.0, can_run=True),
        lambda info: info.swap_out(),
        lambda info: info.leave_arena(),
        lambda info: info.preempt(),
        lambda info: info.restart(2, 1),
        lambda info: info.set_own_slots(7),
    ],
)
def test_a_view_is_made_again_after_every_change(change):
    info = running()
    before = info.view
    assert info.view is before
    change(info)
    assert info.view is not before and info.view.status is info.status


def test_a_view_lists_requests_by_status_in_the_order_of_their_arrival():
    table = RequestTable(Limits(2))
    for number in range(3):
        table.add(RequestInfo(number, float(number), 3))
    table[1].add_computed(3)
    table.add_token(1, 1.0)
    view = table.view(2.0, 10, 5, None)
    assert [r.id for r in view.waiting] == [0, 2] and [r.id for r in view.running] == [1]
    assert view.free_seqs == 1 and table.has_free_seq
