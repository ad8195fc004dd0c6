"""The fake wrapper of latent attention refuses misuse that the library does not notice."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.fakes.fake_device import FakeDevice, on_host
from tests.fakes.fake_flashinfer import FakeFlashInfer
from tests.fakes.fake_latent_wrapper import FakeLatent
from tests.fakes.fake_paged_wrapper import ContractError

NUM_HEADS, PAGE_SIZE, NUM_PAGES, NUM_TOKENS = 4, 4, 16, 5


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


class Calls:
    """A wrapper that is created, planned and run correctly, except for a test's changes.

    Two sequences of 6 and 9 KV tokens, the last 2 and 3 of which are queries.
    """

    def __init__(self) -> None:
        self.device = device = FakeDevice()
        self.making: dict[str, Any] = {
            "float_workspace_buffer": device.zeros(1 << 20, torch.uint8),
            "backend": "fa2",
        }
        self.planning: dict[str, Any] = {
            "qo_indptr": ints(0, 2, 5),
            "kv_indptr": ints(0, 2, 5),
            "kv_indices": device.adopt(ints(3, 7, 1, 2, 9)),
            "kv_len_arr": ints(6, 9),
            "num_heads": NUM_HEADS,
            "head_dim_ckv": 512,
            "head_dim_kpe": 64,
            "page_size": PAGE_SIZE,
            "causal": True,
            "sm_scale": 0.07,
            "q_data_type": torch.bfloat16,
            "kv_data_type": torch.bfloat16,
        }

        def parts(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
            whole = device.adopt(torch.randn(*shape, 576).bfloat16())
            return whole[..., :512], whole[..., 512:]

        query, pages = parts(NUM_TOKENS, NUM_HEADS), parts(NUM_PAGES, PAGE_SIZE)
        self.running: dict[str, Any] = {
            "q_nope": query[0],
            "q_pe": query[1],
            "ckv_cache": pages[0],
            "kpe_cache": pages[1],
            "out": device.adopt(torch.full((NUM_TOKENS, NUM_HEADS, 512), float("nan")).bfloat16()),
        }

    def make(self) -> FakeLatent:
        return FakeFlashInfer(self.device).BatchMLAPagedAttentionWrapper(**self.making)

    def all(self) -> torch.Tensor:
        wrapper = self.make()
        wrapper.plan(**self.planning)
        return wrapper.run(**self.running)


def test_unchanged_calls_are_accepted() -> None:
    assert on_host(Calls().all()).isfinite().all()


def test_a_row_without_keys_is_zeros() -> None:
    calls = Calls()
    calls.planning |= {
        "qo_indptr": ints(0, 1, 2),
        "kv_indptr": ints(0, 2, 2),
        "kv_len_arr": ints(6, 0),
        "causal": False,
    }
    for name in ("q_nope", "q_pe", "out"):
        calls.running[name] = calls.running[name][:2]
    result = on_host(calls.all())
    assert result[0].any()
    assert not result[1].any()


def changed(where: str, **changes: Any) -> Callable[[Calls], Any]:
    """Make all calls with other arguments; a function is given the old one."""

    def violate(calls: Calls) -> Any:
        arguments = getattr(calls, where)
        for name, change in changes.items():
            arguments[name] = change(arguments.get(name)) if callable(change) else change
        return calls.all()

    return violate


def left_out(where: str, name: str) -> Callable[[Calls], Any]:
    def violate(calls: Calls) -> Any:
        del getattr(calls, where)[name]
        return calls.all()

    return violate


def with_heads(num_heads: int) -> Callable[[Calls], Any]:
    return lambda calls: changed("planning", num_heads=num_heads)(calls)


def to_device(name: str) -> Callable[[Calls], Any]:
    return lambda calls: changed("planning", **{name: calls.device.adopt})(calls)


def planned_twice(calls: Calls) -> None:
    wrapper = calls.make()
    for _ in range(2):
        wrapper.plan(**calls.planning)


def captured(change: dict[str, Any]) -> Callable[[Calls], None]:
    """Capture a run, and replay it after another plan."""

    def violate(calls: Calls) -> None:
        wrapper = calls.make()
        wrapper.plan(**calls.planning)
        graph, _ = calls.device.capture(lambda: wrapper.run(**calls.running))
        event = calls.device.event()
        event.record()
        event.synchronize()
        wrapper.plan(**calls.planning | change)
        graph.replay()

    return violate


VIOLATIONS: dict[str, tuple[Callable[[Calls], Any], str]] = {
    "workspace on the host": (
        changed("making", float_workspace_buffer=on_host),
        "workspace is the device's",
    ),
    "a small workspace": (
        changed("making", float_workspace_buffer=lambda each: each[: 1 << 19]),
        "room for partials",
    ),
    "backend by default": (left_out("making", "backend"), "backend"),
    "backend left to choose": (changed("making", backend="auto"), "fa2"),
    "buffers of graphs": (changed("making", use_cuda_graph=True), "fix the batch size"),
    "qo_indptr on the device": (to_device("qo_indptr"), "qo_indptr is on the host"),
    "kv_indptr on the device": (to_device("kv_indptr"), "kv_indptr is on the host"),
    "lengths on the device": (to_device("kv_len_arr"), "len is on the host"),
    "indices on the host": (changed("planning", kv_indices=on_host), "is on the device"),
    "qo_indptr of int64": (changed("planning", qo_indptr=torch.Tensor.long), "is int32"),
    "lengths of int64": (changed("planning", kv_len_arr=torch.Tensor.long), "is int32"),
    "indices of int64": (changed("planning", kv_indices=torch.Tensor.long), "is int32"),
    "indices with gaps": (
        changed("planning", kv_indices=lambda each: torch.cat((each, each))[::2]),
        "contiguous",
    ),
    "kv_indptr from one": (changed("planning", kv_indptr=lambda each: each + 1), "begins with 0"),
    "qo_indptr that falls": (changed("planning", qo_indptr=ints(0, 6, 5)), "does not fall"),
    "a row too few": (changed("planning", kv_len_arr=ints(6)), "one more than rows"),
    "an index too few": (
        changed("planning", kv_indices=lambda each: each[:-1]),
        "every page has an index",
    ),
    "lengths of other pages": (changed("planning", kv_len_arr=ints(6, 8)), "those of the pages"),
    "other latents": (changed("planning", head_dim_ckv=256), "kernels for 512 and 64"),
    "other rotated parts": (changed("planning", head_dim_kpe=32), "kernels for 512 and 64"),
    "queries of float32": (changed("planning", q_data_type=torch.float32), "16 bits"),
    "keys of 8 bits": (changed("planning", kv_data_type=torch.float8_e4m3fn), "as the queries"),
    "a query without its key": (
        changed("planning", qo_indptr=ints(0, 7, 9)),
        "its own key",
    ),
    "queries that see all": (changed("planning", causal=False), "are causal"),
    "heads that do not divide a tile": (with_heads(20), "misses its own key"),
    "more tiles than a plan has": (
        changed(
            "planning",
            num_heads=128,
            qo_indptr=ints(0, 2, 20_000),
            kv_indptr=ints(0, 2, 5002),
            kv_len_arr=ints(6, 20_000),
            kv_indices=lambda each: each.repeat(1001),
        ),
        "fit into the plan",
    ),
    "planned before the copy has run": (planned_twice, "planned again before"),
    "run without a plan": (lambda calls: calls.make().run(**calls.running), "planned before"),
    "other heads than planned": (with_heads(2), "q_nope has the planned shape"),
    "queries on the host": (changed("running", q_nope=on_host), "q_nope is on the device"),
    "queries of another dtype": (
        changed("running", q_pe=torch.Tensor.half),
        "q_pe has the planned",
    ),
    "queries with gaps": (
        changed("running", q_pe=lambda each: each.repeat(1, 1, 2)[..., ::2]),
        "numbers of q_pe follow",
    ),
    "rows that begin anywhere": (
        changed("running", q_nope=lambda each: each.repeat(1, 1, 2)[..., 1:513]),
        "q_nope begin at 16 bytes",
    ),
    "pages with a head": (
        changed("running", ckv_cache=lambda each: each[:, None]),
        "ckv_cache has the planned shape",
    ),
    "pages of another dtype": (changed("running", kpe_cache=torch.Tensor.half), "planned dtype"),
    "no output": (left_out("running", "out"), "out is given"),
    "a page that there is not": (
        changed("planning", kv_indices=lambda each: each + NUM_PAGES),
        "pages are in the cache",
    ),
    "log-sums": (changed("running", return_lse=True), "log-sums are not used"),
    "a replay of other rows": (captured({"qo_indptr": ints(0, 2, 4)}), "rows of its capture"),
    "a replay of another grid": (
        captured({"num_heads": 128}),
        "grid of its capture",
    ),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_each_violation_is_refused(name: str) -> None:
    violate, message = VIOLATIONS[name]
    with pytest.raises((ContractError, TypeError), match=message):
        violate(Calls())
