"""A worker that computes nothing: it answers each step with tokens of its own making."""

from engine_core.scheduler.step_results import ends_of_rows
from proto.model_runner_output import ModelRunnerOutput
from proto.scheduler_output import SchedulerOutput

NUM_TOKEN_IDS = 49_152
"""The vocabulary."""
_PRIME = 7919


class FakeWorker:
    """Knows of each sequence how many tokens it has, which tells who samples in a step."""

    def __init__(self) -> None:
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
                sampled.append([(handle * _PRIME + num_tokens[handle]) % NUM_TOKEN_IDS])
                num_tokens[handle] += 1
        return ModelRunnerOutput(output.epoch, output.step, handles, sampled)
