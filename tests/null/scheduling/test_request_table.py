"""Tests the request table: legal transitions between statuses, and when a view is rebuilt."""

import pytest

from staticllm.pipelines.scheduling.interface import RequestStatus
from staticllm.pipelines.scheduling.request_table import TRANSITIONS, Limits, RequestInfo, RequestTable


def running():
    info = RequestInfo(1, 0.0, 3)
    info.add_computed(3)
    info.add_token(1.0, can_run=True)
    return info


def test_a_request_passes_through_every_status():
    info = RequestInfo(1, 0.0, 3)
    assert info.status == "waiting"
    assert info.view.num_left == 3
    info.add_computed(2)
    assert info.status == "prefilling"
    assert info.view.own_slots == 2
    info.add_computed(1)
    info.add_token(1.0, can_run=False)
    assert info.status == "swapped"
    assert info.view.num_generated == 1
    assert info.view.in_arena
    info.leave_arena()
    info.swap_in(own_slots=3)
    assert info.status == "running"
    assert info.view.own_slots == 3
    assert info.view.in_arena
    info.preempt()
    assert info.status == "waiting"
    assert info.view.num_computed == 0
    assert info.view.num_left == 4


@pytest.mark.parametrize("status", list(RequestStatus))
@pytest.mark.parametrize("following", list(RequestStatus))
def test_illegal_transitions_are_refused(status, following):
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
def test_a_change_of_the_table_changes_the_view(change):
    info = running()
    before = info.view
    assert info.view is before
    change(info)
    assert info.view is not before
    assert info.view.status is info.status


def test_a_view_lists_requests_by_status_in_the_order_of_their_arrival():
    table = RequestTable(Limits(2))
    for number in range(3):
        table.add(RequestInfo(number, float(number), 3))
    table[1].add_computed(3)
    table.add_token(1, 1.0)
    view = table.view(2.0, 10, 5, None)
    assert [r.id for r in view.waiting] == [0, 2]
    assert [r.id for r in view.running] == [1]
    assert view.free_seqs == 1
    assert table.has_free_seq


def test_a_table_counts_its_requests_by_status():
    """The counts are kept with every change, also of requests that leave the table and come back."""
    table, infos = RequestTable(Limits(2)), [RequestInfo(number, float(number), 3) for number in range(4)]

    def counts():
        found = {status: table.count(status) for status in RequestStatus}
        assert found == {status: len(table.ids(status)) for status in RequestStatus}
        return [found[status] for status in RequestStatus]

    for info in infos:
        table.add(info)
    assert counts() == [4, 0, 0, 0]
    for info in infos[:3]:
        info.add_computed(3)
        table.add_token(info.id, 1.0)
    assert counts() == [1, 0, 2, 1]
    table.remove(0)
    infos[0].preempt()
    assert counts() == [1, 0, 1, 1]
    table.add(infos[0])
    assert counts() == [2, 0, 1, 1]
    table.clear()
    infos[1].preempt()
    assert counts() == [0, 0, 0, 0]


def test_a_place_is_left_for_prompts_beside_fed_requests_and_the_last_one_for_these():
    table = RequestTable(Limits(3))
    fed = [RequestInfo(number, 0.0, 9, is_client_driven=True) for number in range(4)]

    def come_back(info):
        info.come_back(8, 1.0, table.num_free_for_clients > 0)
        table.add(info)
        return info.status

    assert [come_back(info) for info in fed[:2]] == ["running", "running"]
    prompt = RequestInfo(9, 0.0, 3)
    table.add(prompt)
    assert table.num_free_for_clients == 0, "the prompt may end in the next call"
    assert come_back(fed[2]) == "swapped"
    prompt.add_computed(3)
    assert table.has_free_seq, "the swapped one is fed"
    table.add_token(9, 1.0)
    assert prompt.status == "running"
    table.remove(0)
    table.add(other := RequestInfo(10, 0.0, 3))
    other.add_computed(3)
    assert table.has_free_seq
    table.add_token(10, 1.0)
    assert not table.has_free_seq
    table.remove(1)
    assert table.count(RequestStatus.RUNNING) == 2
    assert not table.has_free_seq, "the last place is left for the fed one"
    table.remove(2)
    assert table.has_free_seq
