"""Logits with filters, and the tokens that they keep."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.worker.sampling.settings import row_params
from worker.cuda.sampling.device_filters import RowFilters, TritonFilters
from worker.sampling.row_params import RowParams, torch_columns
from worker.sampling.token_order import ordered_bits


def rows_of(count: int, seed: int = 0, **columns: Any) -> RowParams:
    generator = np.random.default_rng(seed)
    fields = {
        "temperature": generator.uniform(0.3, 2.0, count),
        "seed": generator.integers(0, 1 << 64, count, dtype=np.uint64),
        "choice": generator.integers(0, 1 << 32, count, dtype=np.uint32),
        "position": generator.integers(0, 1 << 32, count, dtype=np.uint32),
    }
    return row_params(
        count, **fields | {name: np.resize(value, count) for name, value in columns.items()}
    )


def kept_tokens(
    logits: torch.Tensor, rows: RowParams, device: torch.device | None = None
) -> torch.Tensor:
    """Return the tokens, bool [N, V], that the kernels keep."""
    top_k, top_p, min_p = torch_columns(rows, ("top_k", "top_p", "min_p"))
    top_k[top_k >= logits.shape[1]] = 0
    index = np.arange(len(rows))
    arrays = (rows["temperature"].copy(), index, index, top_k, top_p, min_p)
    temperature, *settings = (torch.from_numpy(each).to(device) for each in arrays)
    searches = bool(((top_k > 0) | (top_p < 1)).any())
    filters = RowFilters(searches, *settings)
    cuts = TritonFilters().cuts(logits.to(device), temperature, filters).cpu()
    keys, ids = ordered_bits(logits / temperature.cpu()[:, None]), torch.arange(logits.shape[1])
    last_key, last_id = cuts[:, :1], cuts[:, 1:]
    return (keys > last_key) | ((keys == last_key) & (ids <= last_id))


FILTERED: dict[str, tuple[float, ...]] = {
    "top_k": (0, 0, 1, 50, 1 << 20, 0, 20, 64, 7),
    "top_p": (0.9, 1e-6, 1.0, 1.0, 0.999, 1.0, 0.95, 0.5, 0.3),
    "min_p": (0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.02, 0.05),
}
"""Filters of nine rows."""

KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float32": lambda noise: 3 * noise,
    "bfloat16": lambda noise: (3 * noise + 9).bfloat16().float(),
    "whole numbers": lambda noise: noise.round(),
    "flat, a few best": lambda noise: noise * 0.01 + 90 * (noise > 2.5),
}
"""How logits come from normal noise; the second and the third have many ties, also at the cut."""


def filtered_case(
    num_rows: int, vocab_size: int, kind: str, **settings: Any
) -> tuple[torch.Tensor, RowParams]:
    noise = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    logits = KINDS[kind](noise)
    logits[::2, 3::7] = float("-inf")
    return logits, rows_of(num_rows, **settings)
