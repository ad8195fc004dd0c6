"""A gate that holds what a test names."""

from engine_core.request import RequestStatus


class FakeGate:
    """Holds the requests in `closed_for`; counts how often it was asked about each."""

    def __init__(self, status=RequestStatus.WAITING_FOR_REMOTE_KVS):
        self.status = status
        self.closed_for = set()
        self.asked = []
        self.admitted_tokens = {}
        self.forgotten = []

    def attach(self, unblock):
        self._unblock = unblock

    def begin_admission(self, plan):
        pass

    def is_blocked(self, candidate):
        self.asked.append(candidate.request)
        return candidate.request in self.closed_for

    def on_admitted(self, request, num_new_tokens):
        self.admitted_tokens[request] = num_new_tokens

    def on_released(self, request):
        self.forgotten.append(request)

    def open_for(self, *requests):
        """What they waited for is there."""
        for each in requests:
            self.closed_for.discard(each)
            self._unblock(each)
