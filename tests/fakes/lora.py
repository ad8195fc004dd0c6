"""Adapters in tests: the request for one, and the workers' side of loads."""

from hashlib import sha256

from proto.messages.lora import LoRARequest
from proto.messages.scheduler_output import SchedulerOutput


def lora_request(number: int, **fields: object) -> LoRARequest:
    """Return the adapter of this id, whose content is the id."""
    return LoRARequest(
        **{  # type: ignore[arg-type]
            "lora_int_id": number,
            "lora_name": f"adapter-{number}",
            "path": f"/adapters/{number}",
            "digest": number.to_bytes(32, "big"),
            **fields,
        }
    )


class AdapterWorkers:
    """Workers that load adapters for a gate of the scheduler, at once unless `loads_later`.

    held: adapters in their memory. loading: under way. loads: all so far, in order.
    """

    def __init__(self, gate: object) -> None:
        self.gate = gate
        self.loads_later = False
        self.held: set[int] = set()
        self.loading: dict[int, None] = {}
        self.loads: list[int] = []
        self.adapter_of: dict[int, int] = {}

    def begin_step(self, output: SchedulerOutput) -> None:
        """Check that a step names at most max_loras adapters, all of which are held."""
        for new in output.new_requests:
            self.adapter_of[new.seq_id] = new.lora_int_id
        named = [*output.cached_requests.seq_ids, *(new.seq_id for new in output.new_requests)]
        adapters = {self.adapter_of[seq_id] for seq_id in named} - {0}
        assert len(adapters) <= self.gate.max_loras  # type: ignore[attr-defined]
        begun = {part.lora_int_id for part in output.scheduled_encoder_inputs if not part.start}
        adapters |= begun - {0}
        assert adapters <= self.held, f"a step names {adapters}, the workers hold {self.held}"
        self.carry_out()

    def carry_out(self) -> None:
        """Carry out the commands to load and to drop."""
        for number, is_load in self.gate.residency.pop_commands():  # type: ignore[attr-defined]
            if is_load:
                assert number not in self.held
                self.loads.append(number)
                self.loading[number] = None
            else:
                self.loading.pop(number, None)
                self.held.discard(number)
        if not self.loads_later:
            self.finish_all()

    def finish_all(self) -> None:
        while self.loading:
            self.finish(next(iter(self.loading)))
            self.carry_out()

    def finish(self, number: int, *, succeeded: bool = True) -> list[object]:
        """Report the end of a load; return the requests that waited for it."""
        self.loading.pop(number)
        if succeeded:
            self.held.add(number)
        return self.gate.end_load(number, succeeded=succeeded, seconds=0.1)  # type: ignore[attr-defined, no-any-return]

    def lose(self) -> None:
        """Forget all adapters, as the workers of a new epoch have none."""
        self.held.clear()
        self.loading.clear()
        self.adapter_of.clear()


def digest_of(content: bytes) -> bytes:
    """Return the digest of an adapter with this content."""
    return sha256(content).digest()
