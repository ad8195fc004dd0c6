"""Estimates of what each step computes, reads and writes on one worker, for `/metrics`.

Estimates follow from the shape of the model (`proto/messages/lifecycle.py:ComputeShape`) and the
planned tokens, so they cost the workers nothing. Attention counts what the causal mask and the
window leave:

    keys      0 1 2 3 4 5
    query 4   x x x x x        num_computed = 4, num_new = 2: 5 + 6 pairs;
    query 5   x x x x x x      with a window of 3: 3 + 3
"""

from engine_core.scheduler.step_plan import StepPlan, num_sampled_positions
from proto.messages.lifecycle import RECURRENT_STATE, WorkerReady


def num_attention_pairs(num_computed: int, num_new: int, window: int | None) -> int:
    """Return pairs of a query among the new tokens and a key that it attends to."""
    if window is None:
        return num_new * num_computed + num_new * (num_new + 1) // 2
    num_growing = min(num_new, max(0, window - num_computed))  # queries that see every key
    return num_attention_pairs(num_computed, num_growing, None) + (num_new - num_growing) * window


class ComputeMeter:
    """Sums FLOPs and bytes of steps, and their shares of the configured peak rates.

    What a draft model computes is not counted: its passes are not part of a step's time either.

    worker: one of the workers; the others' parts of the model are about as large.
    peak_tflops, peak_memory_gbps: of one device; 0: unknown, so there are no shares.
    """

    def __init__(self, worker: WorkerReady, peak_tflops: float, peak_memory_gbps: float) -> None:
        self._shape = worker.compute
        self._weight_bytes = sum(weights.num_bytes for weights in worker.weights)
        self._weight_bytes -= worker.draft_weight_bytes
        self._kv_bytes = worker.geometry.bytes_per_token
        geometry = worker.geometry
        self._windows = [
            group.sliding_window for group in geometry.groups if group.kind != RECURRENT_STATE
        ]
        self._state_bytes = geometry.state_bytes
        self._peak_flops = peak_tflops * 1e12
        self._peak_bytes = peak_memory_gbps * 1e9
        self._steps: dict[int, tuple[int, int]] = {}  # in flight: FLOPs and bytes
        self._totals = [0, 0, 0]
        self._flops_shares: list[float] = []
        self._bandwidth_shares: list[float] = []

    def record_step(self, step: int, plan: StepPlan) -> None:
        """Count a step; called before the counters of its requests advance."""
        shape = self._shape
        flops, num_read, num_tokens, num_positions = 0, 0, 0, 0
        requests = plan.continued + plan.admitted
        counts = plan.continued_tokens + plan.admitted_tokens
        for request, num_new in zip(requests, counts, strict=True):
            num_computed = request.num_computed_tokens
            num_tokens += num_new
            num_positions += num_sampled_positions(
                len(request.all_token_ids) + request.num_output_placeholders,
                num_computed + num_new,
            )
            for window, pair_flops in shape.attention_flops:
                flops += pair_flops * num_attention_pairs(num_computed, num_new, window)
            for window in self._windows:
                keys = num_computed + num_new
                num_read += keys if window is None else min(keys, window + num_new - 1)
        if not num_tokens:
            return
        flops += shape.linear_flops * num_tokens + shape.head_flops * num_positions
        state_bytes = self._state_bytes * len(requests)
        read_bytes = self._weight_bytes + num_read * self._kv_bytes + state_bytes
        write_bytes = num_tokens * self._kv_bytes * len(self._windows) + state_bytes
        for index, number in enumerate((flops, read_bytes, write_bytes)):
            self._totals[index] += number
        self._steps[step] = flops, read_bytes + write_bytes

    def record_time(self, step: int, seconds: float) -> None:
        flops, num_bytes = self._steps.pop(step, (0, 0))
        if seconds > 0.0 and flops:
            if self._peak_flops:
                self._flops_shares.append(flops / seconds / self._peak_flops)
            if self._peak_bytes:
                self._bandwidth_shares.append(num_bytes / seconds / self._peak_bytes)

    def drop_steps(self) -> None:
        """Forget the steps in flight, whose workers died."""
        self._steps.clear()

    def pop_totals(self) -> tuple[int, int, int]:
        """Return FLOPs, bytes read and bytes written since the last call."""
        flops, read_bytes, write_bytes = self._totals
        self._totals = [0, 0, 0]
        return flops, read_bytes, write_bytes

    def pop_shares(self) -> tuple[list[float], list[float]]:
        """Return the shares of the peak FLOPs and bandwidth, by step since the last call."""
        shares = self._flops_shares, self._bandwidth_shares
        self._flops_shares, self._bandwidth_shares = [], []
        return shares
