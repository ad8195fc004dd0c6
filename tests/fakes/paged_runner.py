"""A worker without a model that handles rows and blocks like a real one.

Instead of keys and values it writes a digest of the prefix up to a position. Before every token it
reads back all positions of the sequence through the block table, so a block that is wrongly shared,
evicted or reused is detected immediately. A KV group with a window is read over the window only. A
state group has one digest in a slot: it is read before any sequence of the step writes its own.
Where a step has lookahead, the runner proposes drafts, and writes into the blocks behind the known
tokens as a draft model does.
The next token is a function of the prefix, so runs can be compared.
"""

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from proto.messages.engine_io import LogprobsArrays
from proto.messages.model_runner_output import ModelRunnerOutput, RowLogprobs
from proto.messages.multimodal import MultiModalFeature
from proto.messages.scheduler_output import NewRequestData, SchedulerOutput
from tests.fakes.images import FakeEncoder, image_at

NextToken = Callable[[list[int], int], int]
"""Maps (all token ids so far, choice) to the next token."""


def hashed_token(token_ids: list[int], choice: int, vocab_size: int = 1000) -> int:
    """Return a next token that depends on the whole prefix and the choice."""
    digest = blake2b(struct.pack(f"<{len(token_ids) + 1}I", choice, *token_ids), digest_size=4)
    return int.from_bytes(digest.digest(), "little") % vocab_size


def undisturbed(prompt: list[int], num_tokens: int, choice: int = 0) -> list[int]:
    """Return the tokens that `hashed_token` generates for a prompt without interruption."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(hashed_token(token_ids, choice))
    return token_ids[len(prompt) :]


def hashed_logprobs(token_ids: list[int], vocab_size: int = 1000) -> NDArray[np.float32]:
    """Return logprobs of the next token, a function of the prefix, float32 [vocab_size]."""
    digest = blake2b(struct.pack(f"<{len(token_ids)}I", *token_ids), digest_size=8).digest()
    draw = np.random.default_rng(int.from_bytes(digest, "little"))
    logits = 3 * draw.standard_normal(vocab_size)
    return np.float32(logits - np.log(np.exp(logits).sum()))


@dataclass
class Row:
    """The worker's state of a sequence.

    draft: of the step, at the end of token_ids while it is computed. num_sampled: tokens of this
    sequence that the step has sampled so far.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    choice: int
    prompt_logprobs: bool
    num_candidates: int
    tables: list[list[int]]
    digests: list[bytes] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)
    num_sampled: int = 0
    mm_features: list[MultiModalFeature] = field(default_factory=list)

    def digest(self, position: int) -> bytes:
        """Return the digest of the tokens [0, position] and the images that they belong to."""
        while len(self.digests) <= position:
            before = self.digests[-1] if self.digests else b""
            token = struct.pack("<I", self.token_ids[len(self.digests)])
            token += image_at(self.mm_features, len(self.digests))
            self.digests.append(blake2b(before + token, digest_size=8).digest())
        return self.digests[position]


class PagedRunner:
    """An input batch and a paged cache; `execute` is one step."""

    def __init__(
        self,
        block_size: int,
        next_token: NextToken = hashed_token,
        *,
        read_back: bool = True,
        windows: Sequence[int | None] = (None,),
        has_states: bool = False,
        encoder: FakeEncoder | None = None,
    ) -> None:
        """windows: one per KV group, None for full attention. has_states: whether the last group of
        block tables, which has no window, is that of recurrent states. encoder: of images.
        """
        self.encoder = encoder
        self.has_states = has_states
        self.states: dict[int, bytes] = {}
        self.dice = random.Random(1)
        self.draft_acceptance = 0.7
        self.block_size = block_size
        self.next_token = next_token
        self.read_back = read_back
        self.windows = tuple(windows)
        self.rows: dict[int, Row] = {}
        self.slots: dict[tuple[int, int], bytes] = {}
        self.invalid_rows: dict[int, int] = {}
        """The step in which rows got KV that was not loaded, by seq_id."""
        self.corrupt: set[int] = set()
        """Sequences with KV of an image that could not be encoded."""
        self.steps: list[SchedulerOutput] = []

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute a step like a worker, and check that its message is consistent."""
        self.steps.append(output)
        described_again = {*output.finished_seq_ids, *output.cached_requests.resumed_seq_ids}
        for seq_id in described_again & self.invalid_rows.keys():
            if self.invalid_rows[seq_id] < output.step:
                del self.invalid_rows[seq_id]
        self.corrupt -= described_again
        for seq_id in output.finished_seq_ids:
            del self.rows[seq_id]
        for seq_id in output.preempted_seq_ids:
            self.rows[seq_id].tables = [[] for _ in self.rows[seq_id].tables]
        work = [self._begin(new) for new in output.new_requests] + self._continue(output)
        self._begin_drafts(output)
        self._copy_blocks(output.block_copies)
        copied = dict(zip(output.state_copies[1::2], output.state_copies[::2], strict=True))
        assert not copied.keys() & set(copied.values()), "a copy of a copy"
        self.states |= {copy: self.states[source] for copy, source in copied.items()}
        assert output.total_num_scheduled_tokens == sum(scheduled for _, _, scheduled in work)
        if self.has_states:
            self._run_states(work)
        failed = [] if self.encoder is None else self.encoder.execute(output)
        if self.encoder is not None:
            for seq_id, computed, scheduled in work:
                row = self.rows[seq_id]
                self.encoder.check_chunk(
                    row.mm_features, row.token_ids, computed, computed + scheduled
                )
        # Like a real forward pass, write all rows of the step before reading any.
        for seq_id, computed, scheduled in work:
            self._write(self.rows[seq_id], computed, computed + scheduled)
        result = ModelRunnerOutput(
            output.epoch,
            output.step,
            [],
            [],
            encoder_seconds=0.0 if self.encoder is None else self.encoder.seconds(output),
            failed_mm_hashes=failed,
            failed_seq_ids=[],
        )
        for seq_id, computed, scheduled in work:
            row, end = self.rows[seq_id], computed + scheduled
            result.seq_ids.append(seq_id)
            if seq_id not in self.invalid_rows:
                self._read_back(row, computed, end)
            sampled = self._sample(row, end)
            if self.encoder is not None and self.encoder.fails(row.mm_features, computed, end):
                self.corrupt.add(seq_id)
            if seq_id in self.corrupt:
                result.failed_seq_ids.append(seq_id)
                sampled = []
            result.sampled_token_ids.append(sampled)
            if row.num_candidates and end == len(row.token_ids):
                result.candidates.append(RowLogprobs(seq_id, _best_of(row)))
            if row.prompt_logprobs and computed < row.num_prompt_tokens:
                arrays = LogprobsArrays(computed + 1, 1, b"", b"", b"")
                result.prompt_logprobs.append(RowLogprobs(seq_id, arrays))
        self._propose(output, result, {seq_id: end + count for seq_id, end, count in work})
        return result

    def _propose(
        self, output: SchedulerOutput, result: ModelRunnerOutput, ends: dict[int, int]
    ) -> None:
        """Propose drafts whose tokens are right with probability `draft_acceptance`.

        ends: the positions that the step has computed, by seq_id.
        """
        for seq_id, most in zip(output.lookahead_seq_ids, output.num_lookahead_tokens, strict=True):
            assert seq_id in output.cached_requests.seq_ids
            assert seq_id not in output.cached_requests.resumed_seq_ids
            assert most > 0
            row = self.rows[seq_id]
            for table in row.tables[: len(self.windows)]:
                room = len(table) * self.block_size
                assert ends[seq_id] + most <= room, "lookahead without blocks"
            token_ids, draft = row.token_ids.copy(), list[int]()
            while len(draft) < most:
                for group in range(len(self.windows)):
                    slot = self._slot(row, group, len(token_ids) - 1)
                    if draft:
                        self.slots[slot] = b"a draft"
                is_right = self.dice.random() < self.draft_acceptance
                draft.append(self._guess(row, token_ids) if is_right else 1)
                token_ids.append(draft[-1])
            result.draft_seq_ids.append(seq_id)
            result.draft_token_ids.append(draft)
            result.draft_acceptance_probs.append([0.8 ** (index + 1) for index in range(most)])
            result.draft_pass_rows.extend([1] * most)
            result.draft_pass_seconds.extend([0.001] * most)

    def _guess(self, row: Row, token_ids: list[int]) -> int:
        """Return what the draft model holds for the next token."""
        return self.next_token(token_ids, row.choice)

    def _begin(self, new: NewRequestData) -> tuple[int, int, int]:
        assert new.seq_id not in self.rows, "a sequence was sent twice as new"
        self.rows[new.seq_id] = Row(
            [*new.prompt_token_ids, *new.output_token_ids],
            len(new.prompt_token_ids),
            new.choice,
            new.sampling_params.prompt_logprobs is not None,
            new.sampling_params.num_candidates,
            [list(table) for table in new.block_ids],
            mm_features=new.mm_features,
        )
        assert len(new.block_ids) == len(self.windows) + self.has_states
        return new.seq_id, new.num_computed_tokens, new.num_scheduled_tokens

    def _continue(self, output: SchedulerOutput) -> list[tuple[int, int, int]]:
        cached = output.cached_requests
        resumed = dict(zip(cached.resumed_seq_ids, cached.resumed_output_token_ids, strict=True))
        for seq_id, blocks in zip(cached.seq_ids, cached.new_block_ids, strict=True):
            row = self.rows[seq_id]
            if seq_id in resumed:
                assert blocks is not None
                row.token_ids[row.num_prompt_tokens :] = resumed[seq_id]
                row.digests.clear()
                row.tables = [list(table) for table in blocks]
            elif blocks is not None:
                for table, more in zip(row.tables, blocks, strict=True):
                    table += more
        for seq_id, token_id in zip(cached.forced_seq_ids, cached.forced_token_ids, strict=True):
            self.rows[seq_id].token_ids.append(token_id)
        return list(
            zip(
                cached.seq_ids, cached.num_computed_tokens, cached.num_scheduled_tokens, strict=True
            )
        )

    def _begin_drafts(self, output: SchedulerOutput) -> None:
        for seq_id, draft in output.drafts.items():
            assert draft, "a draft without tokens"
            assert seq_id in output.cached_requests.seq_ids
            row = self.rows[seq_id]
            row.draft = draft
            row.token_ids += draft

    def _copy_blocks(self, pairs: list[int]) -> None:
        sources, copies = pairs[::2], pairs[1::2]
        assert not set(sources) & set(copies), "a copy of a copy"
        assert len(set(copies)) == len(copies), "a block is copied over another copy"
        for source, copy in zip(sources, copies, strict=True):
            for offset in range(self.block_size):
                self.slots.pop((copy, offset), None)
                if (source, offset) in self.slots:
                    self.slots[copy, offset] = self.slots[source, offset]

    def _run_states(self, work: list[tuple[int, int, int]]) -> None:
        """Read and write the states of a step; its sequences are computed in any order."""
        written: dict[int, bytes] = {}
        sources: set[int] = set()
        for seq_id, computed, scheduled in work:
            row, end, size = self.rows[seq_id], computed + scheduled, self.block_size
            table, source = row.tables[-1], 0
            if computed:
                source = table[(computed - 1) // size]
                assert self.states[source] == row.digest(computed - 1), "another state"
            own = {}
            for block in range(computed // size, (end - 1) // size + 1):
                reached = min(end, (block + 1) * size)
                assert table[block] or reached < end, "the last state has no slot"
                if table[block]:
                    own[table[block]] = row.digest(reached - 1)
            assert not own.keys() & written.keys(), "two sequences write to a slot"
            assert not own.keys() & sources, "a slot that another sequence reads is written"
            assert source not in written, "a slot that another sequence writes is read"
            sources.add(source)
            written |= own
        self.states |= written

    def _write(self, row: Row, start: int, end: int) -> None:
        assert end <= len(row.token_ids), "a position without a token"
        for group, table in enumerate(row.tables[: len(self.windows)]):
            assert end <= len(table) * self.block_size, "a position without a block"
            for position in range(start, end):
                self.slots[self._slot(row, group, position)] = self._kv(row, group, position)

    def _read_back(self, row: Row, start: int, end: int) -> None:
        if self.read_back:
            for group, window in enumerate(self.windows):
                first = 0 if window is None else max(0, start - window + 1)
                for position in range(first, end):
                    held = self.slots[self._slot(row, group, position)]
                    assert held == self._kv(row, group, position), (
                        f"position {position} of group {group} holds another prefix"
                    )

    def _sample(self, row: Row, end: int) -> list[int]:
        draft, row.draft, row.num_sampled = row.draft, [], 0
        if end < len(row.token_ids) or row.num_candidates:
            assert not draft, "a draft that is not computed"
            return []
        known = len(row.token_ids) - len(draft)
        del row.token_ids[known:], row.digests[known:]
        for guess in [*draft, None]:
            row.token_ids.append(self.next_token(row.token_ids, row.choice))
            row.num_sampled += 1
            if row.token_ids[-1] != guess:
                break
        return row.token_ids[known:]

    def _kv(self, row: Row, group: int, position: int) -> bytes:
        """Return the content of a group at a position; it differs between groups."""
        return row.digest(position) + bytes([group])

    def _slot(self, row: Row, group: int, position: int) -> tuple[int, int]:
        block = row.tables[group][position // self.block_size]
        assert block != 0, "the null block holds nothing"
        return block, position % self.block_size


def _best_of(row: Row) -> LogprobsArrays:
    logprobs = hashed_logprobs(row.token_ids)
    best = np.argsort(-logprobs, kind="stable")[: row.num_candidates]
    position = len(row.token_ids) - row.num_prompt_tokens
    ids = best.astype("<i4").tobytes()
    values = logprobs[best].astype("<f4").tobytes()
    return LogprobsArrays(position, len(best), ids, values, b"")
