"""Features of the scheduler that a test replaces."""

from engine_core.request import RequestStatus


class NoFeature:
    """Has the methods of `SchedulerFeature`, which may be compiled and cannot be extended then.

    unblock_request: set by the harness.
    """

    status = RequestStatus.WAITING

    def unblock_request(self, request): ...

    def on_request_added(self, request): ...

    def begin_admission(self, plan): ...

    def is_blocked(self, candidate):
        return False

    def on_admitted(self, request, num_new_tokens): ...

    def on_ending(self, request, *, succeeded): ...

    def on_released(self, request): ...


class FakeGate(NoFeature):
    """Blocks the requests in `blocked`; records every check."""

    def __init__(self, status=RequestStatus.WAITING_FOR_REMOTE_KVS):
        self.status = status
        self.blocked = set()
        self.checked = []
        self.admitted_tokens = {}
        self.released = []

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
            self.unblock_request(each)
