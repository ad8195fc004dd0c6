"""First come, first served."""

from collections import OrderedDict
from collections.abc import Iterator

from engine_core.request import Request


class FCFSQueue:
    """Requests in order of arrival; a preempted one goes back to the head.

    Preemption takes the youngest running request first, so several victims put
    back one after the other stand in their old order again.

    An OrderedDict by handle, because all of head, tail and middle are O(1) in it:
    clients that give up abort waiting requests by the thousand.
    """

    def __init__(self) -> None:
        self._requests: OrderedDict[int, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        self._requests[request.handle] = request

    def restore(self, request: Request) -> None:
        self._requests[request.handle] = request
        self._requests.move_to_end(request.handle, last=False)

    def peek(self) -> Request:
        return next(iter(self._requests.values()))

    def pop(self) -> Request:
        return self._requests.popitem(last=False)[1]

    def remove(self, request: Request) -> None:
        del self._requests[request.handle]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())
