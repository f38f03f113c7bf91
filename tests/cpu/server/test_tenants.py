"""Tests that clients get device time in the ratio of their shares, whatever their requests cost; the table is bounded."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("starlette")

from staticllm.server.models.admission import Admission, AdmissionLimits
from staticllm.server.models.tenants import MAX_KNOWN, OTHERS, TenantShares


def served(shares, costs, num_answers=600, limits=None, backlog=8, arrives=None):
    """Return the device seconds of each client after so many answers, each of which takes the seconds in ``costs``.

    Every client always has ``backlog`` requests here; those in ``arrives`` only after so many answers. The oldest that runs ends.
    """

    async def run():
        tenants = TenantShares(shares)
        admission = Admission(limits or AdmissionLimits(4, 4, 1000), tenants)
        running = []
        spent = dict.fromkeys(costs, 0.0)

        async def ask(client):
            await admission.enter(client)
            running.append(client)

        tasks = []
        for number in range(num_answers):
            for client in costs:
                if number == (arrives or {}).get(client, 0):
                    tasks += [asyncio.create_task(ask(client)) for _ in range(backlog)]
            for _ in range(3):
                await asyncio.sleep(0)
            client = running.pop(0)
            spent[client] += costs[client]
            tenants.charge(client, costs[client])
            admission.leave(client)
            tasks.append(asyncio.create_task(ask(client)))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return spent, tenants

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("shares", "costs"),
    [
        ({}, {"a": 1.0, "b": 1.0}),
        ({}, {"a": 1.0, "b": 7.0}),
        ({"a": 3.0}, {"a": 1.0, "b": 1.0}),
        ({"a": 3.0, "b": 0.5}, {"a": 2.0, "b": 1.0, "c": 5.0}),
        ({"a": 0.1}, {"a": 1.0, "b": 1.0}),
    ],
)
def test_device_time_converges_to_the_shares(shares, costs):
    spent, tenants = served(shares, costs)
    whole = sum(shares.get(client, 1.0) for client in costs)
    for client, seconds in spent.items():
        assert seconds / sum(spent.values()) == pytest.approx(shares.get(client, 1.0) / whole, abs=0.03)
        if client in shares:
            assert tenants.seconds[client] == pytest.approx(seconds)
    assert sum(tenants.seconds.values()) == pytest.approx(sum(spent.values()))


def test_one_with_the_least_share_beside_many_has_its_floor():
    clients = {f"c{number}": 1.0 for number in range(9)}
    spent, _ = served({"small": 0.1}, {**clients, "small": 1.0}, num_answers=2000)
    assert spent["small"] / sum(spent.values()) == pytest.approx(0.1 / 9.1, abs=0.005)


def test_nobody_saves_time_up_while_it_is_away_and_a_newcomer_owes_nothing():
    spent, _ = served({}, {"first": 1.0, "late": 1.0}, num_answers=600, arrives={"late": 300})
    assert spent["late"] == pytest.approx(150, abs=5)


def test_a_larger_share_has_all_places_that_one_client_can_have():
    spent, _ = served({"a": 3.0}, {"a": 1.0, "b": 1.0}, limits=AdmissionLimits(10, 6, 1000, max_alone=8), backlog=20)
    assert spent["a"] / spent["b"] == pytest.approx(3.0, rel=0.1)


def test_clients_that_invent_names_do_not_fill_the_memory():
    tenants = TenantShares({"client desk": 2.0})
    for number in range(3 * MAX_KNOWN):
        tenants.begin(f"address {number}")
        tenants.charge(f"address {number}", 1.0)
    assert len(tenants._spent) == MAX_KNOWN
    assert set(tenants.seconds) == {"client desk", OTHERS}
    assert tenants.seconds[OTHERS] == 3 * MAX_KNOWN
    assert tenants.rank("address 0", 0) == 0.0, "one that was forgotten is new"
