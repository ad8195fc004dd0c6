"""Work in proportion to what clients send: who waits for whom, and what ends with its client."""

import asyncio
import threading

import pytest
from starlette.requests import ClientDisconnect

from api_server import turns
from api_server.turns import CLIENT, Client, Turns, WorkThread


async def serve(turns: Turns, served: list[str], name: str, tenant: int, times: int = 1) -> None:
    CLIENT.set(Client(lambda: tenant))
    for _ in range(times):
        await turns.take()
        served.append(name)
        await asyncio.sleep(0)
        turns.give_back()


async def test_tenants_take_turns_and_so_do_their_requests() -> None:
    turns, served = Turns(1), list[str]()
    jobs = [serve(turns, served, "a1", 1, 3), serve(turns, served, "a2", 1, 3)]
    jobs += [serve(turns, served, "b", 2, 3)]
    await asyncio.gather(*map(asyncio.ensure_future, jobs))
    assert served == ["a1", "a2", "b", "a1", "a2", "b", "a1", "a2", "b"]


async def test_new_tenants_do_not_keep_one_that_waits_from_its_turn() -> None:
    turns, served = Turns(1), list[str]()
    await serve(turns, served, "old", 1)
    await turns.take()
    jobs = [asyncio.create_task(serve(turns, served, "old", 1, 2)) for _ in range(2)]
    for tenant in range(2, 100):
        jobs.append(asyncio.create_task(serve(turns, served, "new", tenant)))
        await asyncio.sleep(0)
        if tenant == 10:
            turns.give_back()
    await asyncio.gather(*jobs)
    assert [place for place, name in enumerate(served) if name == "old"][1] == 1
    assert [place for place, name in enumerate(served) if name == "old"][2] <= 100
    assert len(served) == 1 + 4 + 98


async def test_an_amount_is_given_back_by_a_request_that_is_cancelled() -> None:
    turns = Turns(10)
    await turns.take(8)
    waiting = [asyncio.create_task(turns.take(amount)) for amount in (7, 2)]
    await asyncio.sleep(0)
    assert not waiting[1].done()  # in its order, although there is enough for it
    waiting[0].cancel()
    await asyncio.wait(waiting)
    assert not waiting[1].cancelled()
    served = asyncio.create_task(turns.take(8))
    await asyncio.sleep(0)
    turns.give_back(8)
    served.cancel()  # it has the amount, but does not know
    await asyncio.wait([served])
    assert served.cancelled()
    async with asyncio.timeout(5):
        await turns.take(8)


async def test_memory_of_large_bodies_is_returned_once_for_all_that_have_ended(monkeypatch) -> None:
    collections, go_on = [], threading.Event()
    monkeypatch.setattr(turns.gc, "collect", lambda: collections.append(1))
    blocked = asyncio.create_task(turns.run_in_turn(go_on.wait, 60))
    await asyncio.sleep(0)

    async def end(number: int) -> None:
        for _ in range(number):
            client = Client()
            await client.hold_body(turns.UNHELD_BYTES + 1)
            client.end_request()

    await end(20)
    go_on.set()
    await blocked
    await turns.run_in_turn(int)
    assert len(collections) == 1
    await end(1)
    await turns.run_in_turn(int)
    assert len(collections) == 2


async def test_the_work_of_a_client_that_left_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, began, go_on = WorkThread("test"), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        go_on.wait(5)

    running = asyncio.create_task(thread.run(work))
    await asyncio.to_thread(began.wait, 5)
    is_gone = False
    monkeypatch.setattr(turns, "client_disconnected", lambda scope: is_gone)
    CLIENT.set(Client())
    waiting = asyncio.create_task(thread.run(pytest.fail))
    await asyncio.sleep(0)
    is_gone = True
    go_on.set()
    await running
    with pytest.raises(ClientDisconnect):
        await waiting
