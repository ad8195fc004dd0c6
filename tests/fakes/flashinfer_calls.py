"""Correct use of a FlashInfer wrapper, and ways to misuse it."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tests.fakes.fake_device import FakeDevice
from tests.fakes.fake_flashinfer import FakeFlashInfer

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, NUM_PAGES = 4, 2, 64, 4, 16


class Calls:
    """A wrapper that is created, planned and run correctly, except for a test's changes.

    making, planning, running: keyword arguments of these calls. There are two sequences of 6 and
    9 KV tokens; as prefills they have 2 and 3 query tokens.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.device = device = FakeDevice()
        self.indptr = torch.tensor([0, 2, 5], dtype=torch.int32)
        self.making: dict[str, Any] = {
            "float_workspace_buffer": device.zeros(1 << 20, torch.uint8),
            "kv_layout": "HND",
            "backend": "fa2",
        }
        self.planning: dict[str, Any] = {
            "num_qo_heads": NUM_HEADS,
            "num_kv_heads": NUM_KV_HEADS,
            "page_size": PAGE_SIZE,
            "pos_encoding_mode": "NONE",
            "sm_scale": 0.125,
            "window_left": -1,
            "q_data_type": torch.bfloat16,
            "kv_data_type": torch.bfloat16,
            "o_data_type": torch.bfloat16,
            "seq_lens": torch.tensor([6, 9], dtype=torch.int32),
        }
        indices = device.adopt(torch.tensor([3, 7, 1, 2, 9], dtype=torch.int32))
        last_page_len = torch.tensor([2, 1], dtype=torch.int32)
        if kind == "prefill":
            self.planning |= {
                "qo_indptr": torch.tensor([0, 2, 5], dtype=torch.int32),
                "paged_kv_indptr": self.indptr,
                "paged_kv_indices": indices,
                "paged_kv_last_page_len": last_page_len,
                "head_dim_qk": HEAD_DIM,
                "causal": True,
                "max_token_per_sequence": 3,
            }
            self.num_tokens = 5
        else:
            self.making["use_tensor_cores"] = True
            self.planning |= {
                "indptr": self.indptr,
                "indices": indices,
                "last_page_len": last_page_len,
                "head_dim": HEAD_DIM,
            }
            self.num_tokens = 2
        shape = (self.num_tokens, NUM_HEADS, HEAD_DIM)
        pages = (NUM_PAGES, 2, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM)
        key, value = device.adopt(torch.randn(pages).bfloat16()).unbind(1)
        self.running: dict[str, Any] = {
            "q": device.adopt(torch.randn(shape).bfloat16()),
            "paged_kv_cache": (key, value),
            "out": device.adopt(torch.full(shape, float("nan")).bfloat16()),
        }

    def name(self, kind_of_array: str) -> str:
        """Return plan's name of an index array."""
        shared = kind_of_array in ("indptr", "indices", "last_page_len")
        return f"paged_kv_{kind_of_array}" if shared and self.kind == "prefill" else kind_of_array

    def log_sums(self) -> torch.Tensor:
        return self.device.adopt(torch.zeros(self.num_tokens, NUM_HEADS))

    def make(self) -> Any:
        library = FakeFlashInfer(self.device)
        if self.kind == "prefill":
            return library.BatchPrefillWithPagedKVCacheWrapper(**self.making)
        return library.BatchDecodeWithPagedKVCacheWrapper(**self.making)

    def capture(self, num_pages: int = 8) -> None:
        """Create the wrapper for a graph."""
        zeros = self.device.zeros
        self.making |= {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": zeros(3, torch.int32),
            "paged_kv_indices_buffer": zeros(num_pages, torch.int32),
            "paged_kv_last_page_len_buffer": zeros(2, torch.int32),
        }

    def plan(self, wrapper: Any) -> None:
        wrapper.plan(**self.planning)

    def run(self, wrapper: Any) -> Any:
        return wrapper.run(**self.running)

    def all(self) -> Any:
        wrapper = self.make()
        self.plan(wrapper)
        return self.run(wrapper)


def changed(where: str, name: str, change: Callable[[Any], Any]) -> Callable[[Calls], Any]:
    """Make all calls, with one argument passed through `change`."""

    def violate(calls: Calls) -> Any:
        arguments = getattr(calls, where)
        key = calls.name(name)
        arguments[key] = change(arguments.get(key))
        return calls.all()

    return violate


def left_out(where: str, name: str) -> Callable[[Calls], Any]:
    """Make all calls, with one argument left to its default."""

    def violate(calls: Calls) -> Any:
        del getattr(calls, where)[name]
        return calls.all()

    return violate


def be(value: Any) -> Callable[[Any], Any]:
    return lambda old: value


def every_other(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.repeat_interleave(2, output_size=2 * len(tensor))[::2]


def to_device(calls: Calls, name: str) -> Any:
    key = calls.name(name)
    calls.planning[key] = calls.device.adopt(calls.planning[key])
    return calls.all()


def planned_twice(calls: Calls) -> None:
    wrapper, event = calls.make(), calls.device.event()
    event.record()
    calls.plan(wrapper)
    event.synchronize()  # an event before the plan does not cover its copy
    calls.plan(wrapper)


def in_another_thread(calls: Calls) -> None:
    wrapper = calls.make()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(threading.get_ident).result() != threading.get_ident()
        pool.submit(calls.plan, wrapper).result()


def too_many_indices(calls: Calls) -> None:
    calls.capture(num_pages=4)
    calls.all()


def another_batch_size(calls: Calls) -> None:
    calls.capture()
    calls.making["paged_kv_indptr_buffer"] = calls.device.zeros(4, torch.int32)
    calls.making["paged_kv_last_page_len_buffer"] = calls.device.zeros(3, torch.int32)
    calls.all()


def buffers_on_the_host(calls: Calls) -> None:
    calls.capture()
    calls.making["paged_kv_indices_buffer"] = torch.zeros(8, dtype=torch.int32)
    calls.all()


def captured_without_splits(calls: Calls) -> None:
    calls.capture()
    calls.planning["disable_split_kv"] = True
    calls.all()


def captured_in_parts_of(num_pages: int) -> Callable[[Calls], None]:
    """Plan a graph of two sequences, of 2 and 3 pages, in chunks of a given number of pages.

    The graph has 4 tiles.
    """

    def violate(calls: Calls) -> None:
        calls.capture()
        calls.planning["fixed_split_size"] = num_pages
        calls.all()

    return violate


def parts_without_splits(calls: Calls) -> None:
    calls.planning |= {"fixed_split_size": 1, "disable_split_kv": True}
    calls.all()


def without_buffers(calls: Calls) -> None:
    calls.making["use_cuda_graph"] = True
    calls.all()


def unequal_strides(calls: Calls) -> None:
    key, value = calls.running["paged_kv_cache"]
    calls.running["paged_kv_cache"] = (key, value.clone(memory_format=torch.contiguous_format))
    calls.all()


def small_workspace(calls: Calls) -> None:
    """Use a small workspace with a graph, where every tile has its place."""
    calls.making["float_workspace_buffer"] = calls.device.zeros(1 << 10, torch.uint8)
    calls.capture()
    calls.all()


def dirty_workspace(calls: Calls) -> None:
    calls.making["float_workspace_buffer"][7] = 1
    calls.all()


def a_shared_schedule(calls: Calls) -> None:
    schedule = calls.device.zeros(1 << 10, torch.uint8)
    for _ in range(2):
        calls.make().reset_workspace_buffer(calls.making["float_workspace_buffer"], schedule)


def a_schedule_on_the_host(calls: Calls) -> None:
    schedule = torch.zeros(1 << 10, dtype=torch.uint8)
    calls.make().reset_workspace_buffer(calls.making["float_workspace_buffer"], schedule)


def one_memory_for_both(calls: Calls) -> None:
    workspace = calls.making["float_workspace_buffer"]
    calls.make().reset_workspace_buffer(workspace, workspace)


def a_lost_schedule(calls: Calls) -> None:
    wrapper = calls.make()
    calls.plan(wrapper)
    schedule = calls.device.zeros(1 << 10, torch.uint8)
    wrapper.reset_workspace_buffer(calls.making["float_workspace_buffer"], schedule)


def run_only(calls: Calls) -> None:
    calls.run(calls.make())
