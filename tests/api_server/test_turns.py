"""Work in proportion to what clients send: who waits for whom, and what ends with its client."""

import asyncio
import contextlib
import threading

import pytest
from starlette.requests import ClientDisconnect

from api_server import turns
from api_server.http import connection
from api_server.http.connection import Uploads
from api_server.turns import CLIENT, Client, Turns, WorkThread
from proto.errors import OverloadedError


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


async def test_small_requests_pass_larger_ones_but_not_forever() -> None:
    turns, served = Turns(1), list[int]()

    async def serve(size: int) -> None:
        await turns.take(work=size)
        served.append(size)
        if size == 2 and len(served) < 100:  # while it waits, another comes
            jobs.append(asyncio.create_task(serve(2)))
            await asyncio.sleep(0)
        turns.give_back()

    await turns.take()
    jobs = [asyncio.create_task(serve(size)) for size in (20, 10, 30, 2)]
    await asyncio.sleep(0)
    turns.give_back()
    while len(served) < 100:
        await asyncio.sleep(0)
    large = [size for size in served if size > 2]
    assert large == [10, 20, 30]
    assert [served.index(size) for size in large] == [4, 6, 8]
    await asyncio.gather(*jobs)


async def test_a_small_body_passes_larger_ones_of_its_client() -> None:
    go_on, done = threading.Event(), list[int]()
    blocked = asyncio.create_task(turns.run_in_turn(go_on.wait, 60))
    await asyncio.sleep(0)

    async def decode(size: int) -> None:
        client = Client()
        CLIENT.set(client)
        await client.hold_body(bytearray(size))
        await turns.run_for_body(done.append, size)
        client.release_body()

    sizes = [turns.HELD_BYTES, turns.HELD_BYTES // 2, turns.UNHELD_BYTES, 100_000]
    jobs = [asyncio.create_task(decode(size)) for size in sizes]
    await asyncio.sleep(0.01)
    go_on.set()
    await asyncio.gather(blocked, *jobs)
    assert done[:2] == [100_000, turns.UNHELD_BYTES]


@pytest.mark.parametrize(
    ("character", "factor"),
    [("x", 1), ("é€\ufffd", 1), ("🧿", 4), ("\U0010ffff", 4), (r"\ud83e\uddff", 4), (r"\u20ac", 1)],
)
async def test_a_body_with_wide_texts_counts_as_it_will_be_in_memory(character, factor) -> None:
    uploads = Uploads()

    def begin(tenant, end):
        return uploads.begin("10.0.0.1", end)

    scope = {"extensions": {connection._BEGIN_UPLOAD: begin}}
    body = bytearray(f'["{character}{"x" * 900_000}"]'.encode())
    clients = []
    for _ in range(connection.MAX_CLIENT_UPLOAD_BYTES // (factor * len(body))):
        clients.append(Client(scope=scope))
        await clients[-1].hold_body(body)
    assert uploads.num_bytes == len(clients) * len(body) * factor
    clients.append(Client(scope=scope))
    with contextlib.suppress(OverloadedError):  # any of them, since they are equal
        await clients[-1].hold_body(body)
    assert uploads.num_bytes == (len(clients) - 1) * len(body) * factor
    for client in clients:
        client.release_body()
    assert uploads.num_bytes == 0


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
            await client.hold_body(bytearray(turns.UNHELD_BYTES + 1))
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
