"""Attention on CUDA by FlashInfer 0.6.18: two wrappers a KV cache group.

Owns the wrappers, their plans and the order of a step's sequences; paged_batch.py makes
the index arrays, the library has the kernels. Of each group decodes and prefills are
planned apart, because one plan would give a decode the tiles of the longest prompt:

    step ──▶ decodes ──▶ plan ──▶ copy of the schedule is queued ──▶ event
         └─▶ prefills ─▶ plan ──▶      "            "            ──▶ event
    layer ─▶ turn q, k ─▶ write K, V ─▶ run decodes ─▶ run prefills

A plan fills page-locked memory of its wrapper and queues a copy of it. The next plan of
that wrapper waits for the event, or it would write into a copy that has not run yet. Nothing
else waits: what plans need is on the host, and what kernels need was queued before them.

Every argument whose default could change what is computed is named, also where the default
would do: the library's own are float16 and not causal.
"""

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch

from proto.errors import ConfigError
from worker.attention.base import AttentionInputs, AttentionShape
from worker.attention.kv_store import KVStore, TritonStore
from worker.attention.paged_batch import Part, StepPages, gather_pages, step_pages
from worker.attention.staging import Accelerator, Cuda, Staging
from worker.kv_cache import KVCache
from worker.kv_layout import Window
from worker.layers.rotary import Rotation, rotate

VERSION: Final = "0.6.18.post1"
"""What the calls below were written for; another one may mean something else by them."""
HEAD_DIMS: Final = (64, 128, 256)
QUERY_DTYPES: Final = (torch.bfloat16, torch.float16)
WORKSPACE_BYTES: Final = 256 << 20
"""Partial results of split sequences: enough for 512 decodes of 32 heads of 128."""
_BACKEND: Final = "fa2"
"""Named always: on Hopper the library would choose by itself, and plan for longer."""
_LAYOUT: Final = "HND"


class Wrapper(Protocol):
    """What both of the library's wrappers have."""

    def plan(self, *args: Any, **settings: Any) -> None:
        """Schedule a batch on the host and queue the copy of the schedule."""
        ...

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: Any
    ) -> Any:
        """Attend for the queries of the batch last planned."""
        ...


class Library(Protocol):
    """What is used of the module `flashinfer`."""

    def BatchPrefillWithPagedKVCacheWrapper(self, *args: Any, **settings: Any) -> Wrapper:
        """Any number of query tokens a sequence."""
        ...

    def BatchDecodeWithPagedKVCacheWrapper(self, *args: Any, **settings: Any) -> Wrapper:
        """One query token a sequence."""
        ...


@dataclass(frozen=True, slots=True)
class Captures:
    """The batch sizes for which graphs of decodes are captured.

    max_pages: of a batch, and of one group; a graph reads its page indices from one place.
    """

    sizes: tuple[int, ...] = ()
    max_pages: int = 0


NO_CAPTURES: Final = Captures()


def create_flashinfer(
    kv_cache: KVCache, shape: AttentionShape, dtype: torch.dtype, captures: Captures = NO_CAPTURES
) -> "FlashInferAttention":
    """The backend on the device of `kv_cache`, for activations of `dtype`.

    Raises ConfigError where heads, dtypes or the installed version do not fit.
    """
    refuse_unsupported(shape, dtype, kv_cache.dtype)
    accelerator = Cuda(kv_cache.buffer.device)
    return FlashInferAttention(
        kv_cache, shape, dtype, accelerator, load_library(), TritonStore(), captures
    )


def load_library() -> Library:
    """The module; raises ConfigError where it is missing or another version."""
    try:
        found = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        raise _refusal("needs FlashInfer: pip install 'tokend[gpu]'") from None
    if found != VERSION:
        raise _refusal(f"needs flashinfer-python {VERSION}, found {found}")
    import flashinfer

    library: Library = flashinfer
    return library


def refuse_unsupported(shape: AttentionShape, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Raise ConfigError for what the kernels cannot do."""
    if dtype not in QUERY_DTYPES:
        raise _refusal(f"computes in bfloat16 or float16, not {_name(dtype)}")
    if kv_dtype != dtype:
        raise ConfigError(
            f"--attention-backend flashinfer needs K and V as the activations are, {_name(dtype)}, "
            f"not {_name(kv_dtype)}",
            "kv_cache_dtype",
        )
    if shape.head_dim not in HEAD_DIMS:
        sizes = ", ".join(map(str, HEAD_DIMS))
        raise _refusal(f"has kernels for heads of {sizes}, not {shape.head_dim}")


class FlashInferAttention:
    """AttentionBackend over FlashInfer's wrappers; used by one thread on one stream.

    Raises ConfigError as `refuse_unsupported` does.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        shape: AttentionShape,
        dtype: torch.dtype,
        accelerator: Accelerator,
        library: Library,
        store: KVStore,
        captures: Captures = NO_CAPTURES,
        workspace_bytes: int = WORKSPACE_BYTES,
    ) -> None:
        refuse_unsupported(shape, dtype, kv_cache.dtype)
        self._kv_cache = kv_cache
        self._store = store
        self._staging = Staging(accelerator)
        make = _WrapperMaker(accelerator, library, workspace_bytes)
        self._groups = [
            _Group(make, shape, dtype, kv_cache.block_size, window, captures)
            for window in kv_cache.layout.windows
        ]
        self._pages = [kv_cache.layer_pages(i) for i in range(len(kv_cache.layout.places))]

    def plan(self, inputs: Sequence[AttentionInputs]) -> None:
        """As the Protocol says; waits only for the copies of the plans before."""
        pages = step_pages(inputs, self._kv_cache.layout.windows, self._kv_cache.block_size)
        indices = self._upload(inputs, pages)
        begin = 0
        for group, decodes, prefills in zip(
            self._groups, pages.decodes, pages.prefills, strict=True
        ):
            middle = begin + decodes.num_pages
            end = middle + prefills.num_pages
            group.plan(decodes, indices[begin:middle], prefills, indices[middle:end])
            begin = end

    def run(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation,
    ) -> torch.Tensor:
        """As the Protocol says; queues kernels and waits for none."""
        group = self._kv_cache.layout.places[layer].group
        pages = self._pages[layer]
        self._store(self._slots[group], rotate(key, rotation), value, pages)
        turned = rotate(query, rotation)
        if self._moves:
            turned = turned.index_select(0, self._moves[0])
        output = torch.empty_like(turned)
        self._groups[group].run(turned, (pages[0].rows, pages[1].rows), output)
        return output.index_select(0, self._moves[1]) if self._moves else output

    def _upload(self, inputs: Sequence[AttentionInputs], pages: StepPages) -> torch.Tensor:
        """Everything the device needs of a step, in one copy; returns the page indices."""
        moves = [] if pages.order.as_in_step else [pages.order.tokens, pages.order.back]
        sent = self._staging.upload(
            [each.slot_mapping for each in inputs]
            + [pages.runs, pages.shift]
            + [np.concatenate([each.block_table.reshape(-1) for each in inputs])]
            + moves
        )
        num_groups = len(inputs)
        self._slots, (runs, shift, tables, *self._moves) = sent[:num_groups], sent[num_groups:]
        return gather_pages(tables, runs, shift, pages.num_pages)


class _Planned:
    """A wrapper and the event that tells when its next plan may be made."""

    def __init__(self, wrapper: Wrapper, accelerator: Accelerator) -> None:
        self._copied = accelerator.event()
        self._wrapper = wrapper
        self.run = wrapper.run

    def plan(self, *args: Any, **settings: Any) -> None:
        self._copied.synchronize()
        self._wrapper.plan(*args, **settings)
        self._copied.record()


class _WrapperMaker:
    """Makes wrappers that share one workspace: on one stream they run one after the other."""

    def __init__(self, accelerator: Accelerator, library: Library, workspace_bytes: int) -> None:
        self._accelerator = accelerator
        self._library = library
        self._workspace = accelerator.zeros(workspace_bytes, torch.uint8)

    def prefill(self) -> _Planned:
        """For prefills of any number."""
        wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, _LAYOUT, use_cuda_graph=False, backend=_BACKEND
        )
        return _Planned(wrapper, self._accelerator)

    def decode(self) -> _Planned:
        """For decodes of any number."""
        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            _LAYOUT,
            use_cuda_graph=False,
            use_tensor_cores=True,
            backend=_BACKEND,
        )
        return _Planned(wrapper, self._accelerator)

    def captured(self, captures: Captures) -> dict[int, _Planned]:
        """For exactly so many decodes as a graph has; they read their plans from one place."""
        most = max(captures.sizes, default=0)
        indptr = self._accelerator.zeros(most + 1, torch.int32)
        last_page_len = self._accelerator.zeros(most, torch.int32)
        indices = self._accelerator.zeros(captures.max_pages, torch.int32)
        return {
            size: _Planned(
                self._library.BatchDecodeWithPagedKVCacheWrapper(
                    self._workspace,
                    _LAYOUT,
                    use_cuda_graph=True,
                    use_tensor_cores=True,
                    paged_kv_indptr_buffer=indptr[: size + 1],
                    paged_kv_indices_buffer=indices,
                    paged_kv_last_page_len_buffer=last_page_len[:size],
                    backend=_BACKEND,
                ),
                self._accelerator,
            )
            for size in captures.sizes
        }


class _Group:
    """The wrappers of one KV cache group and what of them the current step runs."""

    def __init__(
        self,
        make: _WrapperMaker,
        shape: AttentionShape,
        dtype: torch.dtype,
        block_size: int,
        window: Window,
        captures: Captures,
    ) -> None:
        self._decode = make.decode()
        self._prefill = make.prefill()
        self._captured = make.captured(captures)
        self._sizes = (shape.num_heads, shape.num_kv_heads, shape.head_dim, block_size)
        self._settings: dict[str, Any] = {
            "pos_encoding_mode": "NONE",
            "sm_scale": shape.scale,
            # The query's own token is one of the window, but not to the left of it.
            "window_left": -1 if window is None else window - 1,
            "logits_soft_cap": shape.soft_cap,
            "q_data_type": dtype,
            "kv_data_type": dtype,
            "o_data_type": dtype,
        }

    def plan(
        self,
        decodes: Part,
        decode_pages: torch.Tensor,
        prefills: Part,
        prefill_pages: torch.Tensor,
    ) -> None:
        """Plan both kinds of a step; page indices int32 on the device, all else on the host."""
        self._steps: list[tuple[_Planned, slice]] = []
        if decodes.num_rows:
            wrapper = self._decode
            if not prefills.num_rows:
                wrapper = self._captured.get(decodes.num_rows, self._decode)
            wrapper.plan(
                torch.from_numpy(decodes.kv_indptr),
                decode_pages,
                torch.from_numpy(decodes.last_page_len),
                *self._sizes,
                seq_lens=torch.from_numpy(decodes.kv_lens),
                **self._settings,
            )
            self._steps.append((wrapper, slice(decodes.num_tokens)))
        if prefills.num_rows:
            self._prefill.plan(
                torch.from_numpy(prefills.qo_indptr),
                torch.from_numpy(prefills.kv_indptr),
                prefill_pages,
                torch.from_numpy(prefills.last_page_len),
                *self._sizes,
                causal=True,
                seq_lens=torch.from_numpy(prefills.kv_lens),
                # Otherwise it looks for the longest query in Python, one after the other.
                max_token_per_sequence=prefills.longest_query,
                **self._settings,
            )
            self._steps.append((self._prefill, slice(decodes.num_tokens, None)))

    def run(
        self, query: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor
    ) -> None:
        """query, output: [T, num_heads, head_dim], contiguous, in the order of the batch."""
        for wrapper, tokens in self._steps:
            wrapper.run(query[tokens], pages, out=output[tokens])


def _refusal(what: str) -> ConfigError:
    return ConfigError(f"--attention-backend flashinfer {what}", "attention_backend")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
