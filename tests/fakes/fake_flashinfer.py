"""FlashInfer's paged wrappers on a FakeDevice: slow, correct, and strict about the contract.

A violation of what the library assumes without a check (devices, dtypes, order of calls, capacity,
arguments that need an explicit value) is a ContractError here; results come from the torch
reference. Parameters have the library's names and defaults; a parameter without a default here
has one in the library that must not be relied on.
"""

from typing import Any, Final

import torch

from tests.fakes.fake_device import FakeDevice, on_host
from tests.fakes.fake_flashinfer_modules import FakeModules
from tests.fakes.fake_flashinfer_rows import FakeRowKernels
from tests.fakes.fake_latent_wrapper import FakeLatent
from tests.fakes.fake_paged_wrapper import SIXTEEN_BITS, PagedWrapper, check_index, demand
from tests.fakes.fake_ragged_wrapper import FakeRagged

_SETTINGS: Final = frozenset(
    (
        "causal",
        "pos_encoding_mode",
        "sm_scale",
        "window_left",
        "logits_soft_cap",
        "q_data_type",
        "kv_data_type",
        "o_data_type",
        "fixed_split_size",
        "disable_split_kv",
    )
)


class FakeFlashInfer(FakeRowKernels):
    """The used part of the module `flashinfer`, for one device."""

    def __init__(self, device: FakeDevice, modules: FakeModules | None = None) -> None:
        super().__init__(device, modules)
        self.wrappers: list[PagedWrapper | FakeLatent] = []

    def BatchPrefillWithPagedKVCacheWrapper(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        *,
        backend: str,
    ) -> "FakePrefill":
        demand(not use_cuda_graph, "prefills are not captured")
        wrapper = FakePrefill(
            self._device, float_workspace_buffer, kv_layout, backend, self._modules
        )
        self.wrappers.append(wrapper)
        return wrapper

    def BatchPrefillWithRaggedKVCacheWrapper(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        *,
        backend: str,
    ) -> FakeRagged:
        demand(not use_cuda_graph, "texts are not captured")
        demand(kv_layout == "NHD", "tokens come one after the other")
        wrapper = FakeRagged(
            self._device, float_workspace_buffer, kv_layout, backend, self._modules
        )
        self.wrappers.append(wrapper)
        return wrapper

    def BatchDecodeWithPagedKVCacheWrapper(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        *,
        backend: str,
    ) -> "FakeDecode":
        demand(use_tensor_cores, "without tensor cores not every number of heads is possible")
        wrapper = FakeDecode(
            self._device, float_workspace_buffer, kv_layout, backend, self._modules
        )
        if use_cuda_graph:
            wrapper.fix(
                paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
            )
        self.wrappers.append(wrapper)
        return wrapper

    def BatchMLAPagedAttentionWrapper(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        *,
        backend: str,
    ) -> FakeLatent:
        wrapper = FakeLatent(
            self._device, float_workspace_buffer, use_cuda_graph, backend, self._modules
        )
        self.wrappers.append(wrapper)
        return wrapper

    def fast_decode_plan(
        library,
        self: "FakeDecode",
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype | None = None,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        global_override_indptr_cpu: torch.Tensor | None = None,
    ) -> None:
        demand(self.num_plans > 0, "planned in full before it is planned fast")
        demand(global_override_indptr_cpu is not None, "indptr is read on the host")
        assert global_override_indptr_cpu is not None
        check_index(library._device, indptr, "indptr of the kernels", on_device=True)
        given = {
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
            "pos_encoding_mode": pos_encoding_mode,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
            "sm_scale": sm_scale,
        }
        self.plan_fast(
            global_override_indptr_cpu,
            indices,
            last_page_len,
            (num_qo_heads, num_kv_heads, head_dim, page_size),
            given,
            (fixed_split_size, disable_split_kv),
        )

    def merge_state_in_place(
        self, v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor
    ) -> None:
        self._need("cascade")
        for name, tensor in (("v", v), ("s", s), ("v_other", v_other), ("s_other", s_other)):
            demand(self._device.holds(tensor), f"{name} is on the device")
            demand(tensor.is_contiguous(), f"{name} is contiguous")
        demand(v.dtype == v_other.dtype and v.dtype in SIXTEEN_BITS, "both results have 16 bits")
        # The library would merge sums of another dtype in a copy and drop the result.
        demand(s.dtype == s_other.dtype == torch.float32, "log-sums are float32")
        demand(v.shape == v_other.shape, "both results have one shape")
        demand(v.shape[:2] == s.shape == s_other.shape, "each head has a log-sum")
        own, other = on_host(s), on_host(s_other)
        both = torch.logaddexp2(own, other)
        results = (
            on_host(each).float() * torch.exp2(sums - both)[..., None]
            for each, sums in ((v, own), (v_other, other))
        )
        on_host(v).copy_(sum(results))
        own.copy_(both)


class FakePrefill(PagedWrapper):
    """BatchPrefillWithPagedKVCacheWrapper."""

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        pos_encoding_mode: str = "NONE",
        sm_scale: float | None,
        window_left: int,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        o_data_type: torch.dtype,
        seq_lens: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        demand(max_sequence_kv is None, "with max_sequence_kv the planner has no lengths")
        settings = {name: value for name, value in locals().items() if name in _SETTINGS}
        self._plan(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            settings,
            seq_lens,
        )
        if max_token_per_sequence is not None:
            longest = int(qo_indptr.diff().max())
            demand(max_token_per_sequence == longest, "max_token_per_sequence is the longest query")


class FakeDecode(PagedWrapper):
    """BatchDecodeWithPagedKVCacheWrapper, with or without a fixed batch size."""

    def fix(
        self,
        indptr: torch.Tensor | None,
        indices: torch.Tensor | None,
        last_page_len: torch.Tensor | None,
    ) -> None:
        """Fix the buffers of a graph, which store its plans and set the batch size."""
        demand(
            indptr is not None and indices is not None and last_page_len is not None,
            "a captured wrapper has buffers",
        )
        assert indptr is not None
        assert indices is not None
        assert last_page_len is not None
        for name, buffer in (("indptr", indptr), ("indices", indices), ("last", last_page_len)):
            check_index(self._device, buffer, f"the buffer of {name}", on_device=True)
        demand(len(indptr) == len(last_page_len) + 1, "the buffer of indptr has one more than rows")
        self._buffers = (indptr, indices, last_page_len)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        o_data_type: torch.dtype,
        sm_scale: float | None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        causal = True  # with one query token all keys precede it
        settings = {name: value for name, value in locals().items() if name in _SETTINGS}
        if self._buffers is not None:
            demand(len(last_page_len) == len(self._buffers[2]), "a graph has a fixed batch size")
            demand(len(indices) <= len(self._buffers[1]), "the indices fit into their buffer")
        self._plan(
            torch.arange(len(last_page_len) + 1, dtype=torch.int32),
            indptr,
            indices,
            last_page_len,
            (num_qo_heads, num_kv_heads, head_dim, page_size),
            settings,
            seq_lens,
        )

    def plan_fast(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        shape: tuple[int, int, int, int],
        given: dict[str, Any],
        splits: tuple[int | None, bool],
    ) -> None:
        """fast_decode_plan: the kernels read the buffers that the caller has written."""
        demand(self._buffers is not None, "only a graph's buffers are its caller's")
        assert self._buffers is not None
        planned = self._planned[1]
        same = all(planned[name] == value for name, value in given.items())
        demand(same, "planned fast as it was planned in full")
        check_index(self._device, last_page_len, "last_page_len", on_device=False)
        for buffer, content in zip(
            self._buffers, (indptr, on_host(indices), last_page_len), strict=True
        ):
            written = on_host(buffer)[: len(content)]
            demand(torch.equal(written, content), "the caller fills the buffers of a graph")
        settings = {"fixed_split_size": splits[0], "disable_split_kv": splits[1]}
        self.plan(
            indptr,
            indices,
            last_page_len,
            *shape,
            o_data_type=planned["o_data_type"],
            **given,
            **settings,
        )

    def _keep(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor
    ) -> None:
        super()._keep(indptr, indices, last_page_len)
        if self._buffers is not None:
            buffers = [on_host(each) for each in self._buffers]
            for buffer, content in zip(buffers, self._read, strict=True):
                buffer[: len(content)] = content
            self._read = (buffers[0], buffers[1], buffers[2])
