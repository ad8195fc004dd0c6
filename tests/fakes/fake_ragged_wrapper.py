"""FlashInfer's BatchPrefillWithRaggedKVCacheWrapper on a FakeDevice, strict as the paged ones."""

import threading
from typing import Any

import torch

from tests.fakes.fake_device import on_host
from tests.fakes.fake_paged_wrapper import PagedWrapper, check_index, demand


class FakeRagged(PagedWrapper):
    """Queries, keys and values of a step's tokens, one sequence after another."""

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        *,
        causal: bool,
        pos_encoding_mode: str = "NONE",
        window_left: int,
        logits_soft_cap: float | None = None,
        sm_scale: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        o_data_type: torch.dtype,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        demand(threading.get_ident() == self._thread, "one thread uses a wrapper")
        self._device.refuse_in_capture("a plan")
        demand(
            self._device.completed >= self._schedule,
            "planned again before the copy of the schedule has run",
        )
        for name, offsets in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
            check_index(self._device, offsets, name, on_device=False)
            demand(int(offsets[0]) == 0, f"{name} begins with 0")
            demand(bool((offsets.diff() >= 0).all()), f"{name} does not fall")
        demand(len(qo_indptr) == len(kv_indptr), "each row has queries and keys")
        counts, lens = qo_indptr.diff().tolist(), kv_indptr.diff().tolist()
        demand(any(counts), "there are queries")
        demand(all(lens), "each row has keys")
        if causal:
            fits = all(count <= length for count, length in zip(counts, lens, strict=True))
            demand(fits, "a query has its own key")
        elif window_left >= 0:
            # The planner divides as many keys as a causal mask leaves.
            demand(disable_split_kv, "a window without a causal mask is not split")
        settings = {
            "causal": causal,
            "pos_encoding_mode": pos_encoding_mode,
            "sm_scale": sm_scale,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
            "o_data_type": o_data_type,
            "fixed_split_size": fixed_split_size,
            "disable_split_kv": False,
        }
        shape = (num_qo_heads, num_kv_heads, head_dim_qk, 1)
        self._check_settings(shape, settings)
        demand(kv_data_type == q_data_type, "keys are as the queries")
        if self._modules is not None:
            self._modules.need_attention(head_dim_qk, settings)
        if not disable_split_kv:
            needed = self._workspace_bytes(shape, counts, lens, settings)
            demand(needed <= len(self._workspace), "the workspace has room for partial results")
        self._planned = (shape, settings, qo_indptr.clone())
        self._kv_indptr = kv_indptr.clone()
        self._schedule = self._device.enqueue()
        self.num_plans += 1

    def run(  # type: ignore[override]
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        demand(self.num_plans > 0, "planned before it runs")
        demand(threading.get_ident() == self._thread, "one thread uses a wrapper")
        (heads, kv_heads, head_dim, _), settings, qo_indptr = self._planned
        dtype = settings["q_data_type"]
        packed = (int(qo_indptr[-1]), heads, head_dim)
        demand(out is not None, "out is given")
        assert out is not None
        self._check_tensor(q, "q", packed, dtype)
        self._check_tensor(out, "out", packed, dtype)
        demand(out.is_contiguous(), "out is contiguous")
        # The library does not compare them with the plan, and would read behind them.
        keys = (int(self._kv_indptr[-1]), kv_heads, head_dim)
        for name, tensor, shape in (("q", q, packed), ("k", k, keys), ("v", v, keys)):
            self._check_tensor(tensor, name, shape, dtype)
            demand(tensor.stride(2) == 1, f"heads of {name} are contiguous")
            begins = tensor.data_ptr(), tensor.stride(0) * 2, tensor.stride(1) * 2
            demand(not any(each % 16 for each in begins), f"heads of {name} begin at 16 bytes")

        def kernel() -> None:
            for row in range(len(qo_indptr) - 1):
                queries = slice(int(qo_indptr[row]), int(qo_indptr[row + 1]))
                own = slice(int(self._kv_indptr[row]), int(self._kv_indptr[row + 1]))
                on_host(out)[queries] = _attend(
                    on_host(q)[queries], on_host(k)[own], on_host(v)[own], settings
                )

        self._device.kernel(kernel)
        return out


def visible_keys(num_queries: int, num_keys: int, causal: bool, window_left: int) -> torch.Tensor:
    """Return which keys each query sees, bool [Q, K]; masks count from the right."""
    place = torch.arange(num_keys)
    right = torch.arange(num_keys - num_queries, num_keys)[:, None]
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool)
    if causal:
        seen &= place <= right
    if window_left >= 0:
        seen &= place + window_left >= right
    return seen


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, settings: dict[str, Any]
) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (each.double().repeat_interleave(group, 1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), wide_k) * settings["sm_scale"]
    if cap := settings["logits_soft_cap"]:
        scores = cap * torch.tanh(scores / cap)
    seen = visible_keys(len(q), len(k), settings["causal"], settings["window_left"])
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, wide_v)
