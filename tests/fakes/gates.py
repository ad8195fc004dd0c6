"""A fake admission gate."""

from engine_core.request import RequestStatus


class FakeGate:
    """Blocks the requests in `blocked`; records every check."""

    def __init__(self, status=RequestStatus.WAITING_FOR_REMOTE_KVS):
        self.status = status
        self.blocked = set()
        self.checked = []
        self.admitted_tokens = {}
        self.released = []

    def attach(self, unblock):
        self._unblock = unblock

    def begin_admission(self, plan):
        pass

    def is_blocked(self, candidate):
        self.checked.append(candidate.request)
        return candidate.request in self.blocked

    def on_admitted(self, request, num_new_tokens):
        self.admitted_tokens[request] = num_new_tokens

    def on_released(self, request):
        self.released.append(request)

    def unblock(self, *requests):
        """Unblock requests."""
        for each in requests:
            self.blocked.discard(each)
            self._unblock(each)
