"""StreamNotifier: a callback handles a notification first, otherwise the waiting task wakes."""

import asyncio

from api_server.generation.request_stream import StreamNotifier


async def run_loop(number: int = 3) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_notifications_of_one_iteration_are_handled_once_without_waking_the_task() -> None:
    notifier, handled = StreamNotifier(), []
    waiting = asyncio.create_task(notifier.wait(lambda: not handled.append("news")))
    await run_loop()
    for _ in range(3):
        notifier.notify()
    await run_loop()
    notifier.notify()
    await run_loop()
    assert handled == ["news", "news"]
    assert not waiting.done()
    waiting.cancel()


async def test_the_task_wakes_if_the_callback_cannot_handle_it() -> None:
    notifier, answers = StreamNotifier(), iter([True, False])
    waiting = asyncio.create_task(notifier.wait(lambda: next(answers)))
    await run_loop()
    notifier.notify()
    await run_loop()
    assert not waiting.done()
    notifier.notify()
    await asyncio.wait_for(waiting, 5)
    # A handled notification does not wake the next wait.
    again = asyncio.create_task(notifier.wait())
    await run_loop()
    assert not again.done()
    again.cancel()


async def test_a_notification_before_the_wait_wakes_the_task() -> None:
    notifier, handled = StreamNotifier(), []
    notifier.notify()
    await asyncio.wait_for(notifier.wait(lambda: not handled.append("news")), 5)
    assert handled == []


async def test_a_notification_after_cancellation_is_ignored() -> None:
    notifier, handled = StreamNotifier(), []
    waiting = asyncio.create_task(notifier.wait(lambda: not handled.append("news")))
    await run_loop()
    notifier.notify()
    waiting.cancel()
    await run_loop()
    assert handled == []
