"""Random steps for attention tests, and the float64 answer to compare with."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from worker.attention.base import AttentionBackend, AttentionInputs, AttentionShape
from worker.kv_cache import KVCache, kv_cache_geometry
from worker.kv_layout import kv_layout

LAYER = 1
"""The layer that runs, the second of two; with a window it is in a group of its own."""
NO_BLOCK = 1 << 30


@dataclass(frozen=True)
class Case:
    """sequences: (KV tokens before the step, query tokens) of each. window: of the layer."""

    sequences: tuple[tuple[int, int], ...]
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    seed: int = 0
    window: int | None = None

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim**-0.5)


class Step:
    """A case with its cache filled, its step's q, k, v and its inputs.

    Everything in the cache that no sequence of the step may read is NaN. q, k and v
    are slices of one fused tensor, as a model makes them.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        rng = np.random.default_rng(case.seed)
        generator = torch.Generator().manual_seed(case.seed)
        lens = [before + new for before, new in case.sequences]
        pages = [-(-length // case.block_size) for length in lens]
        num_blocks = sum(pages) + 3
        layout = kv_layout([None, case.window])
        self.kv_cache = KVCache(
            kv_cache_geometry(layout, case.num_kv_heads, case.head_dim, case.dtype),
            layout,
            num_blocks,
            case.block_size,
        )
        self.kv_cache.buffer.fill_(float("nan"))
        free = rng.permutation(np.arange(1, num_blocks))
        # Entries past the last page, or before the window, point at blocks that do not exist.
        table = np.full((len(lens), max(pages) + 2), NO_BLOCK, dtype=np.int32)
        self.expected_kv, slots = [], []
        heads = case.num_heads + 2 * case.num_kv_heads
        total = sum(new for _, new in case.sequences)
        fused = torch.randn(total, heads * case.head_dim, generator=generator).to(case.dtype)
        q, k, v = (
            part.view(total, -1, case.head_dim)
            for part in fused.split(
                [
                    case.num_heads * case.head_dim,
                    case.num_kv_heads * case.head_dim,
                    case.num_kv_heads * case.head_dim,
                ],
                dim=1,
            )
        )
        self.query, self.key, self.value = q, k, v
        start = 0
        for row, (before, new) in enumerate(case.sequences):
            table[row, : pages[row]], free = free[: pages[row]], free[pages[row] :]
            position = np.arange(before + new)
            slot = table[row, position // case.block_size].astype(np.int64) * case.block_size
            slot += position % case.block_size
            old = torch.randn(2, before, case.num_kv_heads, case.head_dim, generator=generator).to(
                case.dtype
            )
            seen = slice(0 if case.window is None else max(0, before + 1 - case.window), before)
            for view, tokens in zip(self.kv_cache.layer_views(LAYER), old, strict=True):
                blocks = torch.from_numpy(slot[seen] // case.block_size)
                view[blocks, :, torch.from_numpy(slot[seen] % case.block_size)] = tokens[seen]
            table[row, : seen.start // case.block_size] = NO_BLOCK
            step = slice(start, start + new)
            self.expected_kv.append((torch.cat((old[0], k[step])), torch.cat((old[1], v[step]))))
            slots.append(slot[before:])
            start += new
        self.inputs = AttentionInputs(
            query_start=np.cumsum([0] + [new for _, new in case.sequences], dtype=np.int32),
            seq_lens=np.array(lens, dtype=np.int32),
            block_table=table,
            slot_mapping=np.concatenate(slots),
        )

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        backend.plan(self.of_all_groups(self.inputs))
        return backend.run(LAYER, self.query, self.key, self.value)

    def of_all_groups(self, inputs: AttentionInputs) -> list[AttentionInputs]:
        """What `plan` takes: the other group, whose layer does not run, gets no blocks."""
        nothing = replace(inputs, block_table=np.full_like(inputs.block_table, NO_BLOCK))
        *others, _ = self.kv_cache.layout.windows
        return [nothing] * len(others) + [inputs]

    def only(self, row: int) -> AttentionInputs:
        """The inputs of one of the sequences by itself."""
        tokens = slice(*self.inputs.query_start[row : row + 2])
        return AttentionInputs(
            query_start=np.array([0, tokens.stop - tokens.start], dtype=np.int32),
            seq_lens=self.inputs.seq_lens[row : row + 1],
            block_table=self.inputs.block_table[row : row + 1],
            slot_mapping=self.inputs.slot_mapping[tokens],
        )

    def expected(self) -> torch.Tensor:
        """The answer in float64, [T, num_heads, head_dim]."""
        answer = torch.empty(self.query.shape, dtype=torch.float64)
        group = self.case.num_heads // self.case.num_kv_heads
        for row, (before, new) in enumerate(self.case.sequences):
            start = int(self.inputs.query_start[row])
            hidden = torch.ones(new, before + new).triu(before + 1).bool()
            if self.case.window is not None:
                hidden |= torch.ones(new, before + new).tril(before - self.case.window).bool()
            key, value = (part.double() for part in self.expected_kv[row])
            for head in range(self.case.num_heads):
                query = self.query[start : start + new, head].double()
                scores = query @ key[:, head // group].T * self.case.shape.scale
                weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=1)
                answer[start : start + new, head] = weights @ value[:, head // group]
        return answer
