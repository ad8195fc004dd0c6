"""Who is called for news: a plain function first, the waiting task where that is not enough."""

import asyncio

from api_server.request_stream import StreamNotifier


async def turns(number: int = 3) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_rings_of_one_turn_are_told_once_and_the_task_sleeps_on() -> None:
    notifier, told = StreamNotifier(), []
    waiting = asyncio.create_task(notifier.wait(lambda: not told.append("news")))
    await turns()
    for _ in range(3):
        notifier.notify()
    await turns()
    notifier.notify()
    await turns()
    assert told == ["news", "news"]
    assert not waiting.done()
    waiting.cancel()


async def test_the_task_wakes_for_what_cannot_be_told() -> None:
    notifier, answers = StreamNotifier(), iter([True, False])
    waiting = asyncio.create_task(notifier.wait(lambda: next(answers)))
    await turns()
    notifier.notify()
    await turns()
    assert not waiting.done()
    notifier.notify()
    await asyncio.wait_for(waiting, 5)
    # What was told, or woken for, is no news any more.
    again = asyncio.create_task(notifier.wait())
    await turns()
    assert not again.done()
    again.cancel()


async def test_a_ring_before_the_wait_is_for_the_task() -> None:
    notifier, told = StreamNotifier(), []
    notifier.notify()
    await asyncio.wait_for(notifier.wait(lambda: not told.append("news")), 5)
    assert told == []


async def test_a_ring_for_who_has_left_does_nothing() -> None:
    notifier, told = StreamNotifier(), []
    waiting = asyncio.create_task(notifier.wait(lambda: not told.append("news")))
    await turns()
    notifier.notify()
    waiting.cancel()
    await turns()
    assert told == []
