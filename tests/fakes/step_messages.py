"""The engine's messages of consecutive steps, for runners that are driven without an engine."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from proto.messages.sampling_params import SamplingParams
from proto.messages.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput

_NONE: Mapping[int, int] = MappingProxyType({})


class StepMessages:
    """Makes the messages: each sequence has pages of its own in each group from its first step.

    num_groups: of KV blocks. num_pages: blocks of a sequence in each. has_states: the last table of
    a sequence has slots of states, as many. The blocks of seq_id 1 come first.
    """

    def __init__(self, num_groups: int, num_pages: int, has_states: bool = False) -> None:
        self._num_groups = num_groups
        self._num_pages = num_pages
        self._has_states = has_states
        self._computed: dict[int, int] = {}
        self._number = 0

    def next_step(
        self,
        new: Mapping[int, Sequence[int]] = MappingProxyType({}),
        chunks: Mapping[int, int] = _NONE,
        finished: tuple[int, ...] = (),
        params: Mapping[str, Any] = MappingProxyType({}),
        drafts: Mapping[int, list[int]] = MappingProxyType({}),
        **fields: Any,
    ) -> SchedulerOutput:
        """Return a step that begins prompts and continues all sequences that have begun.

        new: prompts by seq_id. chunks: scheduled tokens by seq_id, where they are neither a whole
        new prompt nor one token. params: sampling parameters of the prompts, greedy by default.
        fields: others of the message.
        """
        self._number += 1
        for seq_id in finished:
            del self._computed[seq_id]
        old = dict(self._computed)
        counts = {each: chunks.get(each, 1) + len(drafts.get(each, ())) for each in old}
        fresh = {each: chunks.get(each, len(prompt)) for each, prompt in new.items()}
        for seq_id in old:
            self._computed[seq_id] += chunks.get(seq_id, 1)
        self._computed |= fresh
        return SchedulerOutput(
            epoch=1,
            step=self._number,
            new_requests=[
                NewRequestData(
                    seq_id=seq_id,
                    prompt_token_ids=list(prompt),
                    output_token_ids=[],
                    sampling_params=SamplingParams(
                        **{"max_tokens": 9, "temperature": 0.0, **params}
                    ),
                    seed=seq_id,
                    choice=0,
                    block_ids=self._blocks(seq_id),
                    num_computed_tokens=0,
                    num_scheduled_tokens=fresh[seq_id],
                )
                for seq_id, prompt in new.items()
            ],
            cached_requests=CachedRequestData(
                list(old), list(old.values()), list(counts.values()), [None] * len(old), [], []
            ),
            total_num_scheduled_tokens=sum(counts.values()) + sum(fresh.values()),
            finished_seq_ids=list(finished),
            preempted_seq_ids=[],
            spec_decode_seq_ids=list(drafts),
            scheduled_spec_decode_tokens=list(drafts.values()),
            **fields,
        )

    def _blocks(self, seq_id: int) -> list[list[int]]:
        size = self._num_pages
        first = 1 + (seq_id - 1) * self._num_groups * size
        tables = [
            list(range(first + group * size, first + (group + 1) * size))
            for group in range(self._num_groups)
        ]
        if self._has_states:
            tables.append(list(range(1 + (seq_id - 1) * size, 1 + seq_id * size)))
        return tables
