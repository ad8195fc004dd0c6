"""The fake FlashInfer refuses misuse that the library does not notice."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.fakes.fake_device import on_host
from tests.fakes.fake_paged_wrapper import ContractError
from tests.fakes.flashinfer_calls import (
    NUM_HEADS,
    NUM_PAGES,
    PAGE_SIZE,
    Calls,
    a_lost_schedule,
    a_schedule_on_the_host,
    a_shared_schedule,
    another_batch_size,
    be,
    buffers_on_the_host,
    captured_in_parts_of,
    captured_without_splits,
    changed,
    dirty_workspace,
    every_other,
    in_another_thread,
    left_out,
    one_memory_for_both,
    parts_without_splits,
    planned_twice,
    run_only,
    small_workspace,
    to_device,
    too_many_indices,
    unequal_strides,
    without_buffers,
)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_unchanged_calls_are_accepted(kind: str) -> None:
    calls = Calls(kind)
    assert on_host(calls.all()).isfinite().all()
    if kind == "decode":
        captured = Calls(kind)
        captured.capture()
        assert on_host(captured.all()).isfinite().all()


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
    "a workspace that is too small": (
        ("decode",),
        small_workspace,
        "room for partial results",
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
    "parts without pages": (
        BOTH,
        changed("planning", "fixed_split_size", be(0)),
        "a part of a sequence has pages",
    ),
    "parts and no splits": (BOTH, parts_without_splits, "splits have one rule"),
    "a graph without parts": (("decode",), captured_in_parts_of(3), "partial results in every"),
    "more parts than a graph has tiles": (
        ("decode",),
        captured_in_parts_of(1),
        "a tile for each part",
    ),
    "no splits in a graph": (("decode",), captured_without_splits, "splits stay on in graphs"),
    "planned before the copy has run": (BOTH, planned_twice, "planned again before"),
    "planned by another thread": (BOTH, in_another_thread, "one thread"),
    "a schedule shared by two": (BOTH, a_shared_schedule, "do not share a schedule"),
    "a schedule on the host": (BOTH, a_schedule_on_the_host, "is the device's"),
    "one memory for both": (BOTH, one_memory_for_both, "do not share a workspace"),
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
