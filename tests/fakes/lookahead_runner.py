"""A runner with a drafter whose steps ask for drafts, and what it proposes."""

from collections.abc import Callable

from proto.codec import changed
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.scheduler_output import SchedulerOutput
from worker.step.model_runner import ModelRunner

LOOKAHEAD = 4


class LookaheadRunner:
    """A runner whose steps ask for a draft of each sequence that has room for one.

    proposals: by seq_id, (known tokens at the time, draft, acceptance probabilities). pass_rows: by
    step. every: steps from one with lookahead to the next. most: tokens of the longest draft.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        every: int = 1,
        min_acceptance_prob: float = 0.0,
        most: int = LOOKAHEAD,
    ) -> None:
        self.runner = runner
        self.every = every
        self.most = most
        self.min_acceptance_prob = min_acceptance_prob
        self.proposals: list[tuple[int, list[int], list[int], list[float]]] = []
        self.pass_rows: list[list[int]] = []
        self.num_steps = self.num_resumed = self.num_copied = 0
        self.execute_step: Callable[[SchedulerOutput], ModelRunnerOutput] = runner.execute

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.num_steps += 1
        self.num_resumed += len(step.cached_requests.resumed_seq_ids)
        self.num_copied += len(step.block_copies)
        if self.num_steps % self.every == 0:
            step = self._with_lookahead(step)
        output = self.execute_step(step)
        self.pass_rows.append(output.draft_pass_rows)
        batch = self.runner.batch
        for seq_id, draft, acceptance_probs in zip(
            output.draft_seq_ids, output.draft_token_ids, output.draft_acceptance_probs, strict=True
        ):
            row = batch._row_of[seq_id]
            known = batch.token_ids[row, : batch.num_tokens[row]].tolist()
            self.proposals.append((seq_id, known, draft, acceptance_probs))
        return output

    def _with_lookahead(self, step: SchedulerOutput) -> SchedulerOutput:
        """Ask for as many tokens as the blocks of a sequence have room for."""
        table = self.runner.batch.block_table
        group = self.runner.kv_cache.layout.windows.index(None)
        cached = step.cached_requests
        seq_ids, counts = [], []
        for seq_id, computed, scheduled, blocks in zip(
            cached.seq_ids,
            cached.num_computed_tokens,
            cached.num_scheduled_tokens,
            cached.new_block_ids,
            strict=True,
        ):
            if seq_id in cached.resumed_seq_ids:
                num_blocks = len(blocks[group])  # type: ignore[index]
            else:
                added = blocks[group] if blocks else []
                num_blocks = table._length[self.runner.batch._row_of[seq_id]][group] + len(added)
            room = min(self.most, num_blocks * table.block_size - computed - scheduled)
            if room > 0:
                seq_ids.append(seq_id)
                counts.append(room)
        return changed(
            step,
            lookahead_seq_ids=seq_ids,
            num_lookahead_tokens=counts,
            min_draft_acceptance_prob=self.min_acceptance_prob,
        )
