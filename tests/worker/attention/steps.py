"""Random steps for attention tests, and their expected output in float64."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from worker.attention.backend import AttentionBackend, AttentionInputs, AttentionShape
from worker.attention.kv_cache import KVCache, kv_cache_geometry, kv_layout
from worker.models.rope import DefaultRope
from worker.models.rotary import RotaryEmbedding

LAYER = 1
"""The layer that runs, the second of two; with a window it is in a group of its own."""
NO_BLOCK = 1 << 30


@dataclass(frozen=True)
class Case:
    """sequences: (KV tokens before the step, query tokens). window: the layer's, in tokens.

    dtype: of the activations. kv_dtype: of the cache, if it differs. sinks: heads have one each, of
    about the size of scores, and two far below and above. latent_dim: values are that part of keys.
    bidirectional: the window reaches to both sides; no tokens are before the step.
    images: (sequence, first position, end) of tokens that see each other in both directions.
    """

    sequences: tuple[tuple[int, int], ...]
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    seed: int = 0
    window: int | None = None
    kv_dtype: torch.dtype | None = None
    soft_cap: float = 0.0
    sinks: bool = False
    latent_dim: int = 0
    bidirectional: bool = False
    images: tuple[tuple[int, int, int], ...] = ()

    @property
    def shape(self) -> AttentionShape:
        scale = self.head_dim**-0.5
        return AttentionShape(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            scale,
            self.soft_cap,
            self.latent_dim,
            self.bidirectional,
        )


class Step:
    """The tensors and inputs of a case, over a filled cache.

    All parts of the cache that no sequence of the step may read are NaN. q, k and v are slices of
    one fused tensor, as in a model. Rotary positions are the positions in the sequences.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        rng = np.random.default_rng(case.seed)
        generator = torch.Generator().manual_seed(case.seed)
        lens = [before + new for before, new in case.sequences]
        num_pages = [-(-length // case.block_size) for length in lens]
        num_blocks = sum(num_pages) + 3
        layout = kv_layout([None, case.window])
        self.kv_cache = KVCache(
            kv_cache_geometry(
                layout,
                case.num_kv_heads,
                case.head_dim,
                case.kv_dtype or case.dtype,
                1 if case.latent_dim else 2,
            ),
            layout,
            num_blocks,
            case.block_size,
        )
        # All bits set: NaN in every floating type, and scales that are NaN.
        self.kv_cache.buffer.view(torch.uint8).fill_(0xFF)
        free = rng.permutation(np.arange(1, num_blocks))
        # Entries past the last page, or before the window, point at blocks that do not exist.
        table = np.full((len(lens), max(num_pages) + 2), NO_BLOCK, dtype=np.int32)
        self._in_sight: list[tuple[int, torch.Tensor]] = []
        slots, positions = [], []
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
        self._is_latent = case.latent_dim > 0
        self.sinks = torch.randn(case.num_heads, generator=generator) if case.sinks else None
        if self.sinks is not None and case.num_heads > 2:
            self.sinks[1], self.sinks[2] = -200.0, 200.0
        for row, (before, new) in enumerate(case.sequences):
            table[row, : num_pages[row]], free = free[: num_pages[row]], free[num_pages[row] :]
            position = np.arange(before + new)
            slot = table[row, position // case.block_size].astype(np.int64) * case.block_size
            slot += position % case.block_size
            first = 0 if case.window is None else max(0, before + 1 - case.window)
            old = torch.randn(
                2, before - first, case.num_kv_heads, case.head_dim, generator=generator
            )
            in_sight = torch.from_numpy(slot[first:])
            for pages, tokens in zip(self.kv_cache.layer_pages(LAYER), old, strict=True):
                pages.write(in_sight[: before - first], tokens)
            table[row, : first // case.block_size] = NO_BLOCK
            self._in_sight.append((first, in_sight))
            slots.append(slot[before:])
            positions.append(position[before:])
        rotary = RotaryEmbedding(
            DefaultRope(10_000.0), case.shape.rotary_dim, max(lens), torch.device("cpu")
        )
        self.rotation = rotary.at(torch.from_numpy(np.concatenate(positions)))
        self._before = self.kv_cache.buffer.clone()
        self.inputs = AttentionInputs(
            query_start=np.cumsum([0] + [new for _, new in case.sequences], dtype=np.int32),
            seq_lens=np.array(lens, dtype=np.int32),
            block_table=table,
            slot_mapping=np.concatenate(slots),
            attend_end=self._attend_end(positions) if case.images else None,
        )

    def _attend_end(self, positions: list[np.ndarray]) -> np.ndarray:
        """Return where what each token sees ends. positions: of the tokens of each sequence."""
        ends = [each + 1 for each in positions]
        for row, first, end in self.case.images:
            ends[row][(positions[row] >= first) & (positions[row] < end)] = end
        return np.concatenate(ends).astype(np.int32)

    def clear_written(self) -> None:
        """Reset the slots of the step to NaN before another backend writes them."""
        self.kv_cache.buffer.copy_(self._before)

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        backend.plan(self.of_all_groups(self.inputs))
        return backend.run(LAYER, *self.qkv(slice(None)), self.rotation, self.sinks)

    def qkv(self, tokens: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        value = None if self._is_latent else self.value[tokens]
        return self.query[tokens], self.key[tokens], value

    def of_all_groups(self, inputs: AttentionInputs) -> list[AttentionInputs]:
        """Inputs of all groups for `plan`; the group whose layer does not run has no blocks."""
        nothing = replace(inputs, block_table=np.full_like(inputs.block_table, NO_BLOCK))
        *others, _ = self.kv_cache.layout.windows
        return [nothing] * len(others) + [inputs]

    def only(self, row: int) -> AttentionInputs:
        """The inputs of a single sequence."""
        tokens = slice(*self.inputs.query_start[row : row + 2])
        return AttentionInputs(
            query_start=np.array([0, tokens.stop - tokens.start], dtype=np.int32),
            seq_lens=self.inputs.seq_lens[row : row + 1],
            block_table=self.inputs.block_table[row : row + 1],
            slot_mapping=self.inputs.slot_mapping[tokens],
            attend_end=None if self.inputs.attend_end is None else self.inputs.attend_end[tokens],
        )

    def rotated(self, heads: torch.Tensor) -> torch.Tensor:
        """q or k of the step after the rotary embedding, in float64."""
        cosines, sines = self.rotation.double()[:, None].unbind(2)
        latent, rotating = heads.double().tensor_split([self.case.latent_dim], dim=-1)
        first, second = rotating.chunk(2, dim=-1)
        return torch.cat(
            (latent, first * cosines - second * sines, second * cosines + first * sines), dim=-1
        )

    def written(self, part: int) -> torch.Tensor:
        """K (0) or V (1) of the step's tokens as stored in the pages, [T, heads, head_dim]."""
        return self._read(part, torch.from_numpy(self.inputs.slot_mapping))

    def expected(self) -> torch.Tensor:
        """Attention output in float64 over the stored K and V, [T, num_heads, value_dim]."""
        case, value_dim = self.case, self.case.shape.value_dim
        answer = self.query.new_empty((*self.query.shape[:2], value_dim), dtype=torch.float64)
        group = case.num_heads // case.num_kv_heads
        queries = self.rotated(self.query).to(case.dtype).double()
        for row, (before, new) in enumerate(case.sequences):
            start = int(self.inputs.query_start[row])
            first, slots = self._in_sight[row]
            distance = before + torch.arange(new)[:, None] - torch.arange(before + new)
            if case.bidirectional:
                distance = distance.abs()
            hidden = distance < 0
            for image_row, image_first, image_end in case.images:
                if image_row == row:
                    inside = (torch.arange(before + new) >= image_first) & (
                        torch.arange(before + new) < image_end
                    )
                    hidden &= ~(inside[before:, None] & inside)
            if case.window is not None:
                hidden |= distance >= case.window
            key, value = (self._read(part, slots).double() for part in (0, 1))
            value = value[..., :value_dim]
            # [new, kv_heads, group, head_dim] against [seen, kv_heads, head_dim]
            grouped = queries[start : start + new].unflatten(1, (-1, group))
            scores = torch.einsum("qhgd,khd->hgqk", grouped, key) * case.shape.scale
            if case.soft_cap:
                scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
            scores = scores.masked_fill(hidden[:, first:], -torch.inf)
            if self.sinks is not None:
                sink = self.sinks.double().view(-1, group, 1, 1).expand(*scores.shape[:3], 1)
                scores = torch.cat((scores, sink), dim=-1)
            weights = scores.softmax(dim=-1)[..., : key.shape[0]]
            found = torch.einsum("hgqk,khd->qhgd", weights, value)
            answer[start : start + new] = found.flatten(1, 2)
        return answer

    def _read(self, part: int, slots: torch.Tensor) -> torch.Tensor:
        size = self.case.block_size
        blocks, index = torch.unique(slots // size, return_inverse=True)
        pages = self.kv_cache.layer_pages(LAYER)[part].read(blocks)
        return pages[index, :, slots % size]
