"""FlashInfer's wrapper of latent attention on a FakeDevice, strict about the contract.

Like the library's: a run reads the latest plan from the wrapper's memory on the device, so a
replayed graph does, too; but the page indices and the grid are those of the run that was captured.
"""

import threading
from typing import Any, Final

import torch

from tests.fakes.fake_device import FakeDevice, on_host
from tests.fakes.fake_paged_wrapper import SIXTEEN_BITS, check_index, check_workspace, demand
from worker.attention.backend import AttentionShape
from worker.reference.attention import dense_attention

LATENT, ROTATED = 512, 64
_TILE: Final = 64
_MOST_WORKS: Final = 16384


class FakeLatent:
    """BatchMLAPagedAttentionWrapper; num_plans: number of plans."""

    def __init__(
        self,
        device: FakeDevice,
        workspace: torch.Tensor,
        use_cuda_graph: bool,
        backend: str,
        modules: Any = None,
    ) -> None:
        check_workspace(device, workspace)
        demand(backend == "fa2", "the backend is named, and fa2")
        demand(
            not use_cuda_graph, "fixed buffers fix the batch size, and kernels read none of them"
        )
        self._device = device
        self._workspace = workspace
        self._modules = modules
        self._thread = threading.get_ident()
        self._schedule = 0
        self.num_plans = 0
        self.batch_size = None

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        device = self._device
        demand(threading.get_ident() == self._thread, "one thread uses a wrapper")
        device.refuse_in_capture("a plan")
        demand(
            device.completed >= self._schedule,
            "planned again before the copy of the schedule has run",
        )
        # The library copies them to the host, and waits if they are on the device.
        for name, each in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr), ("len", kv_len_arr)):
            check_index(device, each, name, on_device=False)
        check_index(device, kv_indices, "kv_indices", on_device=True)
        for name, offsets in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
            demand(int(offsets[0]) == 0, f"{name} begins with 0")
            demand(bool((offsets.diff() >= 0).all()), f"{name} does not fall")
            demand(len(offsets) == len(kv_len_arr) + 1, f"{name} has one more than rows")
        demand(len(kv_len_arr) > 0, "a plan has rows, whose average length is taken")
        demand(len(kv_indices) >= int(kv_indptr[-1]), "every page has an index")
        counts, lens = qo_indptr.diff(), kv_len_arr
        pages = kv_indptr.diff()
        demand(bool((-(-lens // page_size) == pages).all()), "lengths are those of the pages")
        demand(isinstance(sm_scale, float), "the scale is a number")
        demand(
            (head_dim_ckv, head_dim_kpe) == (LATENT, ROTATED), "there are kernels for 512 and 64"
        )
        demand(q_data_type in SIXTEEN_BITS, "queries have 16 bits")
        demand(kv_data_type == q_data_type, "keys are as the queries")
        demand(not use_profiler, "there is no profiler")
        if causal:
            demand(bool((counts <= lens).all()), "a query has its own key in the cache")
            demand(2 * _TILE % num_heads == 0, "heads divide a tile, or a query misses its own key")
        elif bool((counts > 1).any()):
            demand(False, "several queries of a row are causal")
        if self._modules is not None:
            self._modules.need_latent(q_data_type)
        self._check_memory(counts.tolist(), num_heads)
        self._planned = (num_heads, page_size, causal, sm_scale, q_data_type)
        self._read = (qo_indptr.clone(), kv_indptr.clone(), kv_len_arr.clone())
        self._num_tokens = int(qo_indptr[-1])
        self._indices = kv_indices
        self._clusters = 2 if int(counts.sum()) * num_heads // len(lens) > _TILE else 1
        self._schedule = device.enqueue()
        self.num_plans += 1

    def _check_memory(self, counts: list[int], num_heads: int) -> None:
        """Check sizes as the planner computes them, which checks some only (scheduler.cuh)."""
        cluster = 2 if sum(counts) * num_heads // len(counts) > _TILE else 1
        tile = cluster * _TILE
        tiles = [-(-count * num_heads // tile) for count in counts]
        num_clusters = self._device.num_multiprocessors() // cluster
        works = sum(tiles) + num_clusters
        demand(works <= _MOST_WORKS, "all tiles fit into the plan")
        needed = 2 * num_clusters * tile * (2 * LATENT + 4)
        demand(needed <= len(self._workspace), "the workspace has room for partials")

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor:
        demand(self.num_plans > 0, "planned before it runs")
        demand(threading.get_ident() == self._thread, "one thread uses a wrapper")
        demand(lse is None and not return_lse, "log-sums are not used")
        demand(out is not None, "out is given")
        assert out is not None
        num_heads, page_size, _, _, dtype = self._planned
        rows = (self._num_tokens, num_heads)
        pages = (len(ckv_cache), page_size)
        for name, each, shape in (
            ("q_nope", q_nope, (*rows, LATENT)),
            ("q_pe", q_pe, (*rows, ROTATED)),
            ("ckv_cache", ckv_cache, (*pages, LATENT)),
            ("kpe_cache", kpe_cache, (*pages, ROTATED)),
            ("out", out, (*rows, LATENT)),
        ):
            demand(self._device.holds(each), f"{name} is on the device")
            demand(tuple(each.shape) == shape, f"{name} has the planned shape")
            demand(each.dtype == dtype, f"{name} has the planned dtype")
            demand(each.stride(-1) == 1, f"the numbers of {name} follow one another")
            aligned = all(stride % 8 == 0 for stride in each.stride()[:-1])
            demand(aligned and each.data_ptr() % 16 == 0, f"rows of {name} begin at 16 bytes")
        indices, clusters = self._indices, self._clusters

        def kernel() -> None:
            demand(self._clusters == clusters, "a replay has the grid of its capture")
            demand(self._num_tokens == rows[0], "a replay has the rows of its capture")
            result = self._attend(q_nope, q_pe, ckv_cache, kpe_cache, on_host(indices))
            on_host(out).copy_(result)

        self._device.kernel(kernel)
        return out

    def _attend(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        indices: torch.Tensor,
    ) -> torch.Tensor:
        """Return the output [T, num_heads, 512], float32; zeros of a row without keys."""
        num_heads, _, causal, scale, _ = self._planned
        qo_indptr, kv_indptr, kv_lens = (each.tolist() for each in self._read)
        shape = AttentionShape(num_heads, 1, LATENT + ROTATED, scale, latent_dim=LATENT)
        query = torch.cat((on_host(q_nope), on_host(q_pe)), dim=-1).float()
        output = torch.zeros(query.shape[0], num_heads, LATENT)
        for row, kv_len in enumerate(kv_lens):
            if not kv_len:
                continue
            pages = indices[kv_indptr[row] : kv_indptr[row + 1]].long()
            exists = bool(((pages >= 0) & (pages < len(ckv_cache))).all())
            demand(exists, "pages are in the cache")
            key = torch.cat(
                [on_host(each)[pages].flatten(0, 1)[:kv_len] for each in (ckv_cache, kpe_cache)],
                dim=-1,
            ).float()[None]
            at = slice(qo_indptr[row], qo_indptr[row + 1])
            assert causal or at.stop - at.start == 1
            output[at] = dense_attention(query[at], key, key[..., :LATENT], shape, None)
        return output
