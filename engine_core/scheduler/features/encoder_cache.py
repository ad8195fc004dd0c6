"""Encoder outputs of images in the workers' memory, and how much of them a step computes.

    EncoderBudget          how many rows of encoder output a step computes
    EncoderCacheManager    outputs that the workers keep: who needs them, which one goes first

`encoder_inputs.py` decides what is encoded.
"""

from collections.abc import Iterator, Set
from typing import Final

from engine_core.request import Request, RequestStatus
from proto.messages.multimodal import MultiModalFeature

LONGEST_SECONDS: Final = 0.5
"""Encoder time of a step in which no request decodes."""
PARTS: Final = 16
"""Parts of a row that slices are counted in: a row may take longer than a step should."""
FORGETTING: Final = 0.25
"""How much each measurement counts less with every later one."""


class EncoderBudget:
    """How many rows of encoder output a step computes.

    max_rows: of every step. None: what takes as long as decoding requests can wait, by the measured
    time of a row; one row while that is unknown, and always a part of a row.
    """

    def __init__(self, max_rows: int | None) -> None:
        self._max_rows = max_rows
        self._num_rows = 0.0  # of measured slices, the last ones most
        self._seconds = 0.0  # of the same slices

    def rows(self, spare_seconds: float) -> float:
        """Return the rows of a step. spare_seconds: for which decoding requests can wait."""
        if self._max_rows is not None:
            return float(self._max_rows)
        if not self._seconds:
            return 1.0
        seconds = min(spare_seconds, LONGEST_SECONDS)
        return max(1.0 / PARTS, seconds * self._num_rows / self._seconds)

    def seconds(self, num_rows: float) -> float:
        """Return how long rows take; 0 while that is unknown."""
        return num_rows * self._seconds / self._num_rows if self._num_rows else 0.0

    def learn(self, num_rows: float, seconds: float) -> None:
        if num_rows > 0.0 and seconds > 0.0:
            self._num_rows += num_rows - FORGETTING * self._num_rows
            self._seconds += seconds - FORGETTING * self._seconds


class EncoderOutput:
    """Encoder output of an image, in the workers' memory or on its way there.

    seq_id, index: of the request for which it was begun, and of the image in its prompt.
    num_done: rows in planned steps. first_step: the first of them; 0 until that is sent.
    users: requests that claim it, by seq_id.
    is_confirmed: the result of the step that completes it has arrived. readers: until then, all
        requests that have claimed it or have found KV of the image.
    """

    __slots__ = (
        "feature",
        "first_step",
        "index",
        "is_confirmed",
        "num_done",
        "readers",
        "seq_id",
        "users",
    )

    def __init__(self, feature: MultiModalFeature, seq_id: int, index: int) -> None:
        self.feature = feature
        self.seq_id = seq_id
        self.index = index
        self.num_done = 0.0
        self.first_step = 0
        self.users: dict[int, Request] = {}
        self.is_confirmed = False
        self.readers: dict[int, Request] = {}

    @property
    def is_complete(self) -> bool:
        return self.num_done == self.feature.num_embeds


class EncoderCacheManager:
    """Outputs by the hash of their image, within `capacity` rows.

        begun ─▶ complete, claimed ◀─▶ complete, unclaimed ─▶ evicted, the first one first
          └─▶ dropped, if nothing claims it any more

    Rows are reserved when an image is begun.

    partial: the one that is not complete; None for none.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_free_rows = capacity
        self.partial: EncoderOutput | None = None
        self._outputs: dict[bytes, EncoderOutput] = {}
        self._unclaimed: dict[bytes, EncoderOutput] = {}  # the least recently used one first
        self._claims: dict[int, dict[bytes, EncoderOutput]] = {}  # by seq_id
        self._freed: list[bytes] = []

    def get(self, mm_hash: bytes) -> EncoderOutput | None:
        return self._outputs.get(mm_hash)

    def __iter__(self) -> Iterator[EncoderOutput]:
        return iter(self._outputs.values())

    def __len__(self) -> int:
        return len(self._outputs)

    @property
    def claiming(self) -> Set[int]:
        """The seq_ids of requests with claims."""
        return self._claims.keys()

    def claims_of(self, seq_id: int) -> list[EncoderOutput]:
        return list(self._claims.get(seq_id, {}).values())

    def begin_output(
        self, feature: MultiModalFeature, request: Request, index: int, *, is_urgent: bool
    ) -> EncoderOutput | None:
        """Reserve the rows of an image, evicting others; None, with nothing changed, without room.

        is_urgent: take rows of all requests that wait, not just of parked ones. An output goes only
        if its last result has arrived, so that a failure finds its readers.
        """
        assert self.partial is None, "one image at a time is encoded in part"
        num_missing = feature.num_embeds - self.num_free_rows
        evicted = []
        claimed = [output for output in reversed(self._outputs.values()) if output.users]
        for output in [*self._unclaimed.values(), *claimed]:
            if num_missing <= 0:
                break
            if output.is_confirmed and _may_evict(output, request, is_urgent=is_urgent):
                evicted.append(output)
                num_missing -= output.feature.num_embeds
        if num_missing > 0:
            return None
        for output in evicted:
            self.drop(output)
        output = EncoderOutput(feature, request.seq_id, index)
        self._outputs[feature.mm_hash] = self.partial = output
        self.num_free_rows -= feature.num_embeds
        self.claim(request, output)
        return output

    def advance(self, output: EncoderOutput, num_done: float) -> None:
        """Note that steps up to the one that is planned encode this many rows."""
        output.num_done = num_done
        if output.is_complete:
            self.partial = None

    def claim(self, request: Request, output: EncoderOutput) -> None:
        seq_id, mm_hash = request.seq_id, output.feature.mm_hash
        output.users[seq_id] = request
        self._claims.setdefault(seq_id, {})[mm_hash] = output
        self._unclaimed.pop(mm_hash, None)
        if not output.is_confirmed:
            output.readers[seq_id] = request

    def release(self, seq_id: int, output: EncoderOutput) -> None:
        """End a claim; an output that is not complete is dropped with the last one."""
        del output.users[seq_id]
        self._forget_claim(seq_id, output)
        if not output.users:
            if output.is_complete:
                self._unclaimed[output.feature.mm_hash] = output
            else:
                self.drop(output)

    def drop(self, output: EncoderOutput) -> None:
        """Forget an output with all claims; workers do so with the next step."""
        mm_hash = output.feature.mm_hash
        for seq_id in output.users:
            self._forget_claim(seq_id, output)
        del self._outputs[mm_hash]
        self._unclaimed.pop(mm_hash, None)
        self.num_free_rows += output.feature.num_embeds
        if output is self.partial:
            self.partial = None
        if output.num_done:
            self._freed.append(mm_hash)

    def reset(self) -> bool:
        """Drop all outputs; False, with nothing changed, while any is claimed or being encoded."""
        if not all(output.is_confirmed and not output.users for output in self):
            return False
        for output in list(self._outputs.values()):
            self.drop(output)
        return True

    def forget_workers(self) -> None:
        """Forget everything: new workers hold no output."""
        self._outputs.clear()
        self._unclaimed.clear()
        self._claims.clear()
        self._freed.clear()
        self.partial = None
        self.num_free_rows = self.capacity

    @property
    def has_freed(self) -> bool:
        return bool(self._freed)

    def pop_freed(self) -> list[bytes]:
        """Return the images whose output workers must forget, since the last call."""
        freed, self._freed = self._freed, []
        return freed

    def check(self) -> list[str]:
        """Return what is inconsistent, in words."""
        problems = []
        num_rows = sum(output.feature.num_embeds for output in self)
        if num_rows + self.num_free_rows != self.capacity:
            problems.append(f"{num_rows} rows and {self.num_free_rows} free of {self.capacity}")
        incomplete = [output for output in self if not output.is_complete]
        if incomplete != ([] if self.partial is None else [self.partial]):
            problems.append(f"{len(incomplete)} images are encoded in part")
        for mm_hash, output in self._outputs.items():
            if bool(output.users) is (mm_hash in self._unclaimed):
                problems.append(f"{len(output.users)} requests claim an output in the wrong list")
            if any(self._claims[seq_id].get(mm_hash) is not output for seq_id in output.users):
                problems.append("an output has users without a claim")
        num_claims = sum(map(len, self._claims.values()))
        if num_claims != sum(len(output.users) for output in self):
            problems.append(f"{num_claims} claims, of which some have no output")
        return problems

    def _forget_claim(self, seq_id: int, output: EncoderOutput) -> None:
        claims = self._claims[seq_id]
        del claims[output.feature.mm_hash]
        if not claims:
            del self._claims[seq_id]


def _may_evict(output: EncoderOutput, request: Request, *, is_urgent: bool) -> bool:
    """Return whether a request may have the rows of an output, by the requests that claim it.

    Those of other parked ones; if it is urgent, of all others that wait.
    """
    return all(
        user is not request
        and user.status is not RequestStatus.RUNNING
        and (is_urgent or user.status.is_blocked)
        for user in output.users.values()
    )
