"""EventFd: `notify` makes the descriptor readable, `clear` and `close` end that."""

import os
from select import select

from proto.runtime.sockets import EventFd


def is_readable(descriptor: int) -> bool:
    return bool(select([descriptor], [], [], 0)[0])


def test_readable_from_notify_until_clear() -> None:
    event_fd = EventFd()
    event_fd.clear()
    assert not is_readable(event_fd.descriptor)
    event_fd.notify()
    event_fd.notify()
    assert is_readable(event_fd.descriptor)
    event_fd.clear()
    assert not is_readable(event_fd.descriptor)
    event_fd.close()


def test_notify_after_close_does_not_write_to_a_reused_descriptor() -> None:
    event_fd = EventFd()
    number = event_fd.descriptor
    event_fd.close()
    event_fd.notify()
    other = os.eventfd(0, os.EFD_NONBLOCK)
    os.dup2(other, number)
    event_fd.notify()
    assert not is_readable(number)
    os.close(number)
    if other != number:
        os.close(other)
