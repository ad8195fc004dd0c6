"""A bell wakes whoever waits for its descriptor, and nobody once it is closed."""

import os
from select import select

from proto.event_fd import Bell


def is_readable(descriptor: int) -> bool:
    return bool(select([descriptor], [], [], 0)[0])


def test_it_is_readable_from_a_ring_until_it_is_silenced() -> None:
    bell = Bell()
    bell.silence()
    assert not is_readable(bell.descriptor)
    bell.ring()
    bell.ring()
    assert is_readable(bell.descriptor)
    bell.silence()
    assert not is_readable(bell.descriptor)
    bell.close()


def test_a_late_ring_writes_to_nobody_s_file() -> None:
    bell = Bell()
    number = bell.descriptor
    bell.close()
    bell.ring()
    other = os.eventfd(0, os.EFD_NONBLOCK)
    os.dup2(other, number)
    bell.ring()
    assert not is_readable(number)
    os.close(number)
    if other != number:
        os.close(other)
