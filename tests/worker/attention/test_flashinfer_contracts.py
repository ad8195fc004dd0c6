"""The fake of FlashInfer refuses each way of calling it that the library would not notice."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.fakes.fake_device import FakeDevice, on_host
from tests.fakes.fake_flashinfer import FakeFlashInfer
from tests.fakes.fake_paged_wrapper import ContractError

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, NUM_PAGES = 4, 2, 64, 4, 16


class Calls:
    """One wrapper made, planned and run as it should be, but for what a test changes.

    making, planning, running: keyword arguments. Two sequences, of 6 and 9 KV tokens;
    as prefills they have 2 and 3 query tokens.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.device = device = FakeDevice()
        self.indptr = torch.tensor([0, 2, 5], dtype=torch.int32)
        self.making: dict[str, Any] = {
            "float_workspace_buffer": device.zeros(1 << 10, torch.uint8),
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
        """Of an index array as plan calls it."""
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
        """Make it for a graph."""
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


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_the_calls_are_right_when_nothing_is_changed(kind: str) -> None:
    calls = Calls(kind)
    assert on_host(calls.all()).isfinite().all()
    if kind == "decode":
        captured = Calls(kind)
        captured.capture()
        assert on_host(captured.all()).isfinite().all()


def changed(where: str, name: str, change: Callable[[Any], Any]) -> Callable[[Calls], Any]:
    """All calls, with one argument put through `change`."""

    def violate(calls: Calls) -> Any:
        arguments = getattr(calls, where)
        key = calls.name(name)
        arguments[key] = change(arguments.get(key))
        return calls.all()

    return violate


def left_out(where: str, name: str) -> Callable[[Calls], Any]:
    """All calls, with one argument left to its default."""

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
    event.synchronize()  # an event from before the plan says nothing of its copy
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


def without_buffers(calls: Calls) -> None:
    calls.making["use_cuda_graph"] = True
    calls.all()


def unequal_strides(calls: Calls) -> None:
    key, value = calls.running["paged_kv_cache"]
    calls.running["paged_kv_cache"] = (key, value.clone(memory_format=torch.contiguous_format))
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


BOTH = ("prefill", "decode")
VIOLATIONS: dict[str, tuple[tuple[str, ...], Callable[[Calls], Any], str]] = {
    "workspace on the host": (
        BOTH,
        changed("making", "float_workspace_buffer", on_host),
        "workspace is the device's",
    ),
    "workspace of floats": (
        BOTH,
        changed("making", "float_workspace_buffer", lambda each: each.float()),
        "workspace is bytes",
    ),
    "workspace not zeroed": (BOTH, dirty_workspace, "workspace begins as zeros"),
    "workspace askew": (
        BOTH,
        changed("making", "float_workspace_buffer", lambda each: each[1:]),
        "aligned to 16",
    ),
    "backend by default": (BOTH, left_out("making", "backend"), "backend"),
    "backend left to choose": (BOTH, changed("making", "backend", be("auto")), "fa2"),
    "unknown layout": (BOTH, changed("making", "kv_layout", be("DHN")), "NHD or HND"),
    "another layout": (BOTH, changed("making", "kv_layout", be("NHD")), "k cache has the planned"),
    "no tensor cores": (("decode",), left_out("making", "use_tensor_cores"), "tensor cores"),
    "captured prefill": (("prefill",), without_buffers, "prefills are not captured"),
    "captured without buffers": (("decode",), without_buffers, "has buffers"),
    "buffers on the host": (("decode",), buffers_on_the_host, "indices is on the device"),
    "another batch size": (("decode",), another_batch_size, "fixed batch size"),
    "too many indices": (("decode",), too_many_indices, "fit into their buffer"),
    "qo_indptr on the device": (
        ("prefill",),
        lambda calls: to_device(calls, "qo_indptr"),
        "qo_indptr is on the host",
    ),
    "indptr on the device": (
        BOTH,
        lambda calls: to_device(calls, "indptr"),
        "indptr is on the host",
    ),
    "last_page_len on the device": (
        BOTH,
        lambda calls: to_device(calls, "last_page_len"),
        "last_page_len is on the host",
    ),
    "seq_lens on the device": (
        BOTH,
        lambda calls: to_device(calls, "seq_lens"),
        "seq_lens is on the host",
    ),
    "indices on the host": (BOTH, changed("planning", "indices", on_host), "is on the device"),
    "qo_indptr of int64": (
        ("prefill",),
        changed("planning", "qo_indptr", torch.Tensor.long),
        "qo_indptr is int32",
    ),
    "indptr of int64": (BOTH, changed("planning", "indptr", torch.Tensor.long), "indptr is int32"),
    "indices of int64": (BOTH, changed("planning", "indices", torch.Tensor.long), "is int32"),
    "last_page_len of int64": (
        BOTH,
        changed("planning", "last_page_len", torch.Tensor.long),
        "is int32",
    ),
    "indptr with gaps": (BOTH, changed("planning", "indptr", every_other), "flat and contiguous"),
    "indices with gaps": (BOTH, changed("planning", "indices", every_other), "contiguous"),
    "indptr from one": (
        BOTH,
        changed("planning", "indptr", lambda each: each + 1),
        "begins with 0",
    ),
    "indptr that falls": (
        BOTH,
        changed("planning", "indptr", be(torch.tensor([0, 6, 5], dtype=torch.int32))),
        "does not fall",
    ),
    "a row too few": (
        BOTH,
        changed("planning", "last_page_len", lambda each: each[:1]),
        "one more than rows",
    ),
    "an index too many": (
        BOTH,
        changed("planning", "indices", lambda each: torch.cat((each, each[:1]))),
        "ends with the number of indices",
    ),
    "an empty last page": (
        BOTH,
        changed("planning", "last_page_len", lambda each: each - 1),
        "1 to page_size",
    ),
    "a last page too full": (
        BOTH,
        changed("planning", "last_page_len", lambda each: each + PAGE_SIZE),
        "1 to page_size",
    ),
    "other lengths": (BOTH, changed("planning", "seq_lens", lambda each: each + 1), "seq_lens"),
    "a query without its key": (
        ("prefill",),
        lambda calls: (
            calls.planning.update(
                qo_indptr=torch.tensor([0, 7, 9]).int(), max_token_per_sequence=7
            ),
            calls.all(),
        ),
        "its own key",
    ),
    "another longest query": (
        ("prefill",),
        changed("planning", "max_token_per_sequence", be(9)),
        "longest query",
    ),
    "max_sequence_kv": (
        ("prefill",),
        changed("planning", "max_sequence_kv", be(9)),
        "no lengths",
    ),
    "causal by default": (("prefill",), left_out("planning", "causal"), "causal"),
    "a window that is not causal": (
        ("prefill",),
        lambda calls: (calls.planning.update(causal=False, window_left=3), calls.all()),
        "a window is causal",
    ),
    "query dtype by default": (BOTH, left_out("planning", "q_data_type"), "q_data_type"),
    "cache dtype by default": (BOTH, left_out("planning", "kv_data_type"), "kv_data_type"),
    "output dtype by default": (BOTH, left_out("planning", "o_data_type"), "o_data_type"),
    "scale by default": (BOTH, left_out("planning", "sm_scale"), "sm_scale"),
    "window by default": (BOTH, left_out("planning", "window_left"), "window_left"),
    "float32": (BOTH, changed("planning", "q_data_type", be(torch.float32)), "16 bits"),
    "dtype of the cache": (
        BOTH,
        changed("planning", "kv_data_type", be(torch.float16)),
        "keys are as the queries",
    ),
    "output of another dtype than queries": (
        BOTH,
        changed("planning", "o_data_type", be(torch.float16)),
        "results are as the queries",
    ),
    "heads of 96": (
        ("decode",),
        changed("planning", "head_dim", be(96)),
        "kernels for these heads",
    ),
    "heads that do not divide": (
        BOTH,
        changed("planning", "num_qo_heads", be(3)),
        "KV heads divide",
    ),
    "rotation by the kernel": (
        BOTH,
        changed("planning", "pos_encoding_mode", be("ROPE_LLAMA")),
        "positions are in the keys",
    ),
    "splits of a fixed size": (
        BOTH,
        changed("planning", "fixed_split_size", be(8)),
        "splits are the planner's",
    ),
    "no splits": (BOTH, changed("planning", "disable_split_kv", be(True)), "splits stay on"),
    "planned before the copy has run": (BOTH, planned_twice, "planned again before"),
    "planned by another thread": (BOTH, in_another_thread, "one thread"),
    "a schedule shared by two": (BOTH, a_shared_schedule, "schedule of its own"),
    "a schedule on the host": (BOTH, a_schedule_on_the_host, "is the device's"),
    "one memory for both": (BOTH, one_memory_for_both, "each its memory"),
    "a lost schedule": (BOTH, a_lost_schedule, "would be lost"),
    "run without a plan": (BOTH, run_only, "planned before it runs"),
    "queries on the host": (BOTH, changed("running", "q", on_host), "q is on the device"),
    "a query too few": (BOTH, changed("running", "q", lambda each: each[:-1]), "q has the planned"),
    "queries of another dtype": (
        BOTH,
        changed("running", "q", torch.Tensor.half),
        "q has the planned dtype",
    ),
    "heads of q with gaps": (
        BOTH,
        changed("running", "q", lambda each: torch.cat((each, each), 2)[..., ::2]),
        "heads of q are contiguous",
    ),
    "no output": (BOTH, left_out("running", "out"), "out is given"),
    "output with gaps": (
        BOTH,
        changed("running", "out", lambda each: torch.cat((each, each), 1)[:, :NUM_HEADS]),
        "out is contiguous",
    ),
    "output of another dtype": (
        BOTH,
        changed("running", "out", torch.Tensor.half),
        "out has the planned dtype",
    ),
    "a list of caches": (BOTH, changed("running", "paged_kv_cache", list), "a tuple"),
    "caches with other strides": (BOTH, unequal_strides, "equal strides"),
    "caches with gaps": (
        BOTH,
        changed(
            "running",
            "paged_kv_cache",
            lambda pair: tuple(torch.cat((each, each), 3)[..., ::2] for each in pair),
        ),
        "are contiguous",
    ),
    "caches of another dtype": (
        BOTH,
        changed("running", "paged_kv_cache", lambda pair: tuple(each.half() for each in pair)),
        "k cache has the planned dtype",
    ),
    "a page that there is not": (
        BOTH,
        changed("planning", "indices", lambda each: each + NUM_PAGES),
        "pages are in the cache",
    ),
    "log-sums that nobody asked for": (
        BOTH,
        lambda calls: changed("running", "lse", be(calls.log_sums()))(calls),
        "lse is asked for",
    ),
    "another window": (BOTH, changed("running", "window_left", be(3)), "the planned one"),
    "sinks": (BOTH, changed("running", "sinks", be(torch.zeros(NUM_HEADS))), "ignored"),
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for name in VIOLATIONS for kind in VIOLATIONS[name][0]]
)
def test_each_violation_is_refused(kind: str, name: str) -> None:
    _, violate, message = VIOLATIONS[name]
    with pytest.raises((ContractError, TypeError), match=message):
        violate(Calls(kind))


MERGES: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor], str]] = {
    "on the host": (0, on_host, "v is on the device"),
    "with gaps": (2, lambda each: torch.cat((each, each), 2)[..., ::2], "v_other is contiguous"),
    "of float32": (0, torch.Tensor.float, "16 bits"),
    "log-sums of 16 bits": (1, torch.Tensor.half, "log-sums are float32"),
    "of other queries": (2, lambda each: each[:1], "one shape"),
    "log-sums of other heads": (3, lambda each: each[:, :1].contiguous(), "each head"),
}


def states() -> list[torch.Tensor]:
    """v, s, v_other, s_other of two queries, on a device that owns the library."""
    shape = (2, NUM_HEADS, HEAD_DIM)
    results, sums = torch.randn(2, *shape).bfloat16(), torch.randn(2, *shape[:2])
    return [each for pair in zip(results, sums, strict=True) for each in pair]


@pytest.mark.parametrize("name", MERGES)
def test_merges_that_would_go_wrong_are_refused(name: str) -> None:
    device = FakeDevice()
    arguments = [device.adopt(each) for each in states()]
    FakeFlashInfer(device).merge_state_in_place(*arguments)
    place, change, message = MERGES[name]
    arguments[place] = change(arguments[place])
    with pytest.raises(ContractError, match=message):
        FakeFlashInfer(device).merge_state_in_place(*arguments)
