"""The common part of FlashInfer's two paged wrappers, strict about the contract.

Plans are checked and stored, results are computed by the torch reference; the differences between
decodes and prefills are in fake_flashinfer.py.
"""

import math
import threading
import weakref
from typing import Any, Final, Protocol

import torch

from tests.fakes.fake_device import FakeDevice, on_host
from worker.attention.backend import AttentionShape
from worker.reference.attention import dense_attention, first_in_sight

HEAD_DIMS: Final = (64, 128, 256)
SIXTEEN_BITS: Final = (torch.bfloat16, torch.float16)
LAYOUTS: Final = ("NHD", "HND")


class ContractError(Exception):
    """A misuse that the library does not report, or only by a wrong result or a crash."""


def demand(holds: bool, what: str) -> None:
    if not holds:
        raise ContractError(what)


class Modules(Protocol):
    """Kernel modules that were loaded at the start."""

    def need_attention(self, head_dim: int, settings: dict[str, Any]) -> None:
        """Raise ContractError if a module that a plan needs is not loaded."""
        ...


class PagedWrapper:
    """The common part of both wrappers.

    num_plans: number of plans. for_all_queries: in the last plan all queries attend to all keys,
    as for a shared prefix. longest_walk: the most pages that one tile of the last plan reads.
    """

    def __init__(
        self,
        device: FakeDevice,
        workspace: torch.Tensor,
        kv_layout: str,
        backend: str,
        modules: Modules | None = None,
    ) -> None:
        check_workspace(device, workspace)
        self._workspace = workspace
        demand(kv_layout in LAYOUTS, "the layout is NHD or HND")
        demand(backend == "fa2", "the backend is named, and fa2")
        self._device = device
        self._modules = modules
        self._heads_first = kv_layout == "HND"
        self._thread = threading.get_ident()
        self._buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._schedule = 0
        self.num_plans = 0
        self.for_all_queries = False
        self.longest_walk = 0

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        demand(self.num_plans == 0, "a schedule would be lost")
        check_workspace(self._device, float_workspace_buffer)
        check_workspace(self._device, int_workspace_buffer)
        place = int_workspace_buffer.untyped_storage().data_ptr()
        demand(
            place != float_workspace_buffer.untyped_storage().data_ptr(),
            "wrappers do not share a workspace",
        )
        demand(self._device.claim(place), "wrappers do not share a schedule")
        weakref.finalize(
            int_workspace_buffer, self._device.release, place
        )  # its memory may be reused
        self._memory = (float_workspace_buffer, int_workspace_buffer)
        self._workspace = float_workspace_buffer

    @property
    def batch_size(self) -> int | None:
        """The batch size of a graph; None if it may vary."""
        return None if self._buffers is None else len(self._buffers[2])

    def _plan(
        self,
        qo_indptr: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        shape: tuple[int, int, int, int],
        settings: dict[str, Any],
        seq_lens: torch.Tensor | None,
    ) -> None:
        demand(threading.get_ident() == self._thread, "one thread uses a wrapper")
        self._device.refuse_in_capture("a plan")
        demand(
            self._device.completed >= self._schedule,
            "planned again before the copy of the schedule has run",
        )
        self._check_indices(qo_indptr, indptr, indices, last_page_len, shape[3])
        self._check_settings(shape, settings)
        lens = _kv_lens(indptr, last_page_len, shape[3])
        if seq_lens is not None:
            check_index(self._device, seq_lens, "seq_lens", on_device=False)
            demand(seq_lens.tolist() == lens, "seq_lens are those of the pages")
        counts = qo_indptr.diff().tolist()
        if settings["causal"]:
            hopeless = any(c > n > 0 for c, n in zip(counts, lens, strict=True))
            demand(not hopeless, "a query has its own key in the cache")
        else:
            demand(settings["window_left"] < 0, "a window is causal")
        if self._modules is not None:
            self._modules.need_attention(shape[2], settings)
        needed = self._workspace_bytes(shape, counts, indptr.diff().tolist(), settings)
        demand(needed <= len(self._workspace), "the workspace has room for partial results")
        self._planned = (shape, settings, qo_indptr.clone())
        self.for_all_queries = not settings["causal"]
        self._keep(indptr, indices, last_page_len)
        self._schedule = self._device.enqueue()
        self.num_plans += 1

    def _workspace_bytes(
        self,
        shape: tuple[int, int, int, int],
        counts: list[int],
        pages: list[int],
        settings: dict[str, Any],
    ) -> int:
        """Return the size of partial results, of tiles as FA2's planner divides a batch into them.

        scheduler.cuh, PrefillSplitQOKVIndptr. With a graph nothing that kernels of a replay depend
        on may differ from the plan that was captured: the number of tiles, and that there are
        partial results.
        """
        num_heads, num_kv_heads, head_dim, page_size = shape
        rows = [each * (num_heads // num_kv_heads) for each in counts]
        average = sum(rows) // max(1, len(rows))
        tile = 16 if average <= 16 else 64 if average <= 64 or head_dim >= 256 else 128
        tiles = [-(-each // tile) for each in rows]
        most = 2 * self._device.num_multiprocessors() // num_kv_heads
        if settings["window_left"] >= 0:
            in_window = -(-(settings["window_left"] + tile) // page_size)
            pages = [min(each, in_window) for each in pages]
        longest = max(pages, default=1)

        def num_tiles(chunk: int) -> int:
            return sum(t * -(-max(n, 1) // chunk) for t, n in zip(tiles, pages, strict=True))

        in_graph, fixed = self._buffers is not None, settings["fixed_split_size"]
        if settings["disable_split_kv"]:
            chunk, is_split = max(longest, 1), False
        elif fixed is not None:
            chunk, is_split = fixed, longest > fixed
            demand(is_split or not in_graph, "a graph has partial results in every plan")
        else:
            chunk = max(128 // page_size, 1)
            while chunk < longest and num_tiles(chunk) > most:
                chunk += 1
            is_split = in_graph or chunk < longest
        self.longest_walk = min(chunk, longest)
        planned = num_tiles(chunk)
        if in_graph:
            launched = max(most, -(-sum(rows) // tile) + len(rows) - 1)
            demand(planned <= launched, "a graph has a tile for each part of a sequence")
            planned = launched
        return num_heads * planned * tile * (head_dim + 1) * 4 if is_split else 0

    def _keep(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor
    ) -> None:
        """Return the arrays that kernels read: copies of host arrays, and the page indices."""
        self._read = (indptr.clone(), on_host(indices), last_page_len.clone())

    def _check_indices(
        self,
        qo_indptr: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        page_size: int,
    ) -> None:
        check_index(self._device, qo_indptr, "qo_indptr", on_device=False)
        check_index(self._device, indptr, "indptr", on_device=False)
        check_index(self._device, last_page_len, "last_page_len", on_device=False)
        check_index(self._device, indices, "indices", on_device=True)
        for name, offsets in (("qo_indptr", qo_indptr), ("indptr", indptr)):
            demand(int(offsets[0]) == 0, f"{name} begins with 0")
            demand(bool((offsets.diff() >= 0).all()), f"{name} does not fall")
            demand(len(offsets) == len(last_page_len) + 1, f"{name} has one more than rows")
        demand(len(indices) == int(indptr[-1]), "indptr ends with the number of indices")
        fits = bool(((last_page_len >= 1) & (last_page_len <= page_size)).all())
        demand(fits, "a last page has 1 to page_size tokens")

    def _check_settings(self, shape: tuple[int, int, int, int], settings: dict[str, Any]) -> None:
        num_heads, num_kv_heads, head_dim, page_size = shape
        demand(num_heads % num_kv_heads == 0, "KV heads divide query heads")
        demand(head_dim in HEAD_DIMS, "there are kernels for these heads")
        demand(page_size >= 1, "a page has tokens")
        demand(settings["pos_encoding_mode"] == "NONE", "positions are in the keys")
        demand(isinstance(settings["sm_scale"], float), "the scale is named")
        dtype = settings["q_data_type"]
        demand(dtype in SIXTEEN_BITS, "queries have 16 bits")
        demand(settings["o_data_type"] == dtype, "results are as the queries")
        fitting = (dtype, torch.float8_e4m3fn)
        demand(settings["kv_data_type"] in fitting, "keys are as the queries, or have 8 bits")
        fixed = settings["fixed_split_size"]
        demand(fixed is None or fixed > 0, "a part of a sequence has pages")
        demand(fixed is None or not settings["disable_split_kv"], "splits have one rule")
        in_graph = self._buffers is not None
        demand(not (in_graph and settings["disable_split_kv"]), "splits stay on in graphs")

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> Any:
        scales = (q_scale, k_scale, v_scale, sinks)
        demand(self.num_plans > 0, "planned before it runs")
        demand(threading.get_ident() == self._thread, "one thread uses a wrapper")
        demand(all(each is None for each in scales), "scales and sinks are ignored")
        shape, settings, qo_indptr = self._planned
        num_tokens = int(qo_indptr[-1])
        demand(window_left in (None, settings["window_left"]), "the window is the planned one")
        packed = (num_tokens, shape[0], shape[2])
        self._check_tensor(q, "q", packed, settings["q_data_type"])
        demand(q.stride(2) == 1, "heads of q are contiguous")
        demand(out is not None, "out is given")
        assert out is not None
        self._check_tensor(out, "out", packed, settings["o_data_type"])
        demand(out.is_contiguous(), "out is contiguous")
        key, value = self._check_cache(paged_kv_cache, shape, settings["kv_data_type"])
        if lse is not None:
            self._check_tensor(lse, "lse", packed[:2], torch.float32)
            demand(return_lse and lse.is_contiguous(), "lse is asked for, and contiguous")
        demand(lse is not None or not return_lse, "lse is given")

        def kernel() -> None:
            result = self._attend(on_host(q), key, value)
            on_host(out).copy_(result[0])
            if lse is not None:
                on_host(lse).copy_(result[1])

        self._device.kernel(kernel)
        return (out, lse) if return_lse else out

    def _check_tensor(
        self, tensor: torch.Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        demand(self._device.holds(tensor), f"{name} is on the device")
        demand(tuple(tensor.shape) == shape, f"{name} has the planned shape")
        demand(tensor.dtype == dtype, f"{name} has the planned dtype")

    def _check_cache(
        self, cache: Any, shape: tuple[int, int, int, int], dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, each [pages, kv_heads, page_size, head_dim] on the host."""
        demand(isinstance(cache, tuple) and len(cache) == 2, "the cache is a tuple (k, v)")
        _, num_kv_heads, head_dim, page_size = shape
        page = (num_kv_heads, page_size) if self._heads_first else (page_size, num_kv_heads)
        for name, pages in zip(("k", "v"), cache, strict=True):
            self._check_tensor(pages, f"{name} cache", (len(pages), *page, head_dim), dtype)
            demand(pages.stride(3) == 1, f"heads of the {name} cache are contiguous")
        demand(cache[0].stride() == cache[1].stride(), "k and v have equal strides")
        key, value = (on_host(each) for each in cache)
        return (key, value) if self._heads_first else (key.transpose(1, 2), value.transpose(1, 2))

    def _attend(
        self, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [T, Hq, D] and log-sum-exp to the base 2 [T, Hq], float32."""
        (num_heads, num_kv_heads, head_dim, page_size), settings, qo_indptr = self._planned
        soft_cap = settings["logits_soft_cap"] or 0.0
        heads = AttentionShape(num_heads, num_kv_heads, head_dim, settings["sm_scale"], soft_cap)
        window = None if settings["window_left"] < 0 else settings["window_left"] + 1
        indptr, indices, last_page_len = self._read
        output = torch.zeros(q.shape)
        scores = torch.full(q.shape[:2], -math.inf)
        for row, kv_len in enumerate(_kv_lens(indptr, last_page_len, page_size)):
            if kv_len == 0:
                continue
            pages = indices[int(indptr[row]) : int(indptr[row + 1])].long()
            demand(bool(((pages >= 0) & (pages < len(key))).all()), "pages are in the cache")
            at = slice(int(qo_indptr[row]), int(qo_indptr[row + 1]))
            first = first_in_sight(kv_len - (at.stop - at.start), window)
            k, v = (
                each[pages]
                .float()
                .transpose(0, 1)
                .reshape(num_kv_heads, -1, head_dim)[:, first:kv_len]
                for each in (key, value)
            )
            queries = q[at].float()
            if settings["causal"]:
                output[at] = dense_attention(queries, k, v, heads, window)
            else:
                output[at] = torch.cat(
                    [dense_attention(each[None], k, v, heads, None) for each in queries]
                )
            scores[at] = _log_sums(queries, k, heads, window, settings["causal"])
        return output, scores


def check_workspace(device: FakeDevice, workspace: torch.Tensor) -> None:
    demand(device.holds(workspace), "the workspace is the device's")
    demand(workspace.dtype == torch.uint8, "the workspace is bytes")
    demand(not on_host(workspace).any(), "the workspace begins as zeros")
    demand(workspace.data_ptr() % 16 == 0, "the workspace is aligned to 16 bytes")


def check_index(device: FakeDevice, tensor: torch.Tensor, name: str, on_device: bool) -> None:
    where = "device" if on_device else "host"
    demand(device.holds(tensor) == on_device, f"{name} is on the {where}")
    demand(tensor.dtype == torch.int32, f"{name} is int32")
    demand(tensor.dim() == 1 and tensor.is_contiguous(), f"{name} is flat and contiguous")


def _kv_lens(indptr: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> list[int]:
    """Return KV lengths like the kernels: full pages and the last one; 0 without pages."""
    pages = indptr.diff()
    lens = (pages - 1) * page_size + last_page_len
    return torch.where(pages > 0, lens, 0).tolist()


def _log_sums(
    queries: torch.Tensor,
    key: torch.Tensor,
    shape: AttentionShape,
    window: int | None,
    causal: bool,
) -> torch.Tensor:
    """Return the log-sum-exp of the scores to the base 2, [Q, Hq]; key [Hkv, N, D]."""
    num_queries, num_tokens = queries.shape[0], key.shape[1]
    wide = key.repeat_interleave(shape.group_size, 0)
    scores = torch.einsum("qhd,hnd->qhn", queries, wide) * shape.scale
    if shape.soft_cap:
        scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
    if causal:
        distance = torch.arange(num_tokens - num_queries, num_tokens)[:, None] - torch.arange(
            num_tokens
        )
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        scores = scores.masked_fill(hidden[:, None], -math.inf)
    return scores.logsumexp(-1) * math.log2(math.e)
