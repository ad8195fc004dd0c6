"""A worker that computes nothing: it answers each step with tokens of its own making."""

from engine_core.scheduler.step_results import ends_of_rows
from proto.lifecycle import KVCacheGeometry
from proto.model_runner_output import ModelRunnerOutput
from proto.scheduler_output import SchedulerOutput

NUM_TOKEN_IDS = 49_152
"""The vocabulary."""
GEOMETRY = KVCacheGeometry(
    num_slots=30, num_kv_heads=3, head_dim=64, dtype="bfloat16", bytes_per_token=23_040
)
"""SmolLM2's. Nothing that is measured depends on it."""
_PRIME = 7919


class FakeWorker:
    """Knows of each sequence how many tokens it has, which tells who samples in a step.

    vocab_size: its tokens are smaller, and not below `lowest`.
    """

    def __init__(self, vocab_size: int = NUM_TOKEN_IDS, lowest: int = 0) -> None:
        self._lowest = lowest
        self._span = vocab_size - lowest
        self._num_tokens: dict[int, int] = {}

    def answer(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """A token for each sequence whose tokens are all computed after this step."""
        num_tokens = self._num_tokens
        for handle in output.finished_handles:
            num_tokens.pop(handle, None)
        for new in output.new_requests:
            num_tokens[new.handle] = len(new.prompt_token_ids) + len(new.output_token_ids)
        handles = [each.handle for each in output.new_requests] + output.cached_requests.handles
        sampled: list[list[int]] = []
        for handle, end in zip(handles, ends_of_rows(output), strict=True):
            if end < num_tokens[handle]:
                sampled.append([])
            else:
                mixed = handle * _PRIME + num_tokens[handle]
                sampled.append([self._lowest + mixed % self._span])
                num_tokens[handle] += 1
        return ModelRunnerOutput(output.epoch, output.step, handles, sampled)
