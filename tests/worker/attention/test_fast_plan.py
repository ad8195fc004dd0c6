"""FlashInfer's rules for planning a graph's wrapper again, each violated once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.fakes.fake_device import FakeDevice, on_host
from tests.fakes.fake_flashinfer import FakeFlashInfer
from tests.fakes.fake_paged_wrapper import ContractError

SIZES = (4, 2, 64, 16)
SETTINGS: dict[str, Any] = {
    "pos_encoding_mode": "NONE",
    "window_left": -1,
    "logits_soft_cap": 0.0,
    "q_data_type": torch.bfloat16,
    "kv_data_type": torch.bfloat16,
    "sm_scale": 0.125,
}


class ReplannedWrapper:
    """A graph's wrapper for two sequences that has been planned once."""

    def __init__(self) -> None:
        self.device = device = FakeDevice()
        self.library = FakeFlashInfer(device)
        self.buffers = [device.zeros(size, torch.int32) for size in (3, 8, 2)]
        self.wrapper = self._wrapper(*self.buffers)
        self.indptr = torch.tensor([0, 2, 3], dtype=torch.int32)
        self.last = torch.tensor([5, 16], dtype=torch.int32)
        self.indices = device.adopt(torch.tensor([4, 7, 1], dtype=torch.int32))
        self.settings = dict(SETTINGS)
        self.is_planned = True
        self.fills = True

    def _wrapper(self, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor) -> Any:
        return self.library.BatchDecodeWithPagedKVCacheWrapper(
            self.device.zeros(1 << 20, torch.uint8),
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last,
            backend="fa2",
        )

    def run(self) -> None:
        if self.is_planned:
            self.wrapper.plan(
                torch.tensor([0, 1, 2], dtype=torch.int32),
                self.device.zeros(2, torch.int32),
                torch.ones(2, dtype=torch.int32),
                *SIZES,
                o_data_type=torch.bfloat16,
                **SETTINGS,
            )
            self.device.complete(self.device.queued)
        if self.fills:
            for buffer, content in zip(
                self.buffers, (self.indptr, self.indices, self.last), strict=True
            ):
                on_host(buffer)[: len(content)] = on_host(content)
        self.library.fast_decode_plan(
            self.wrapper,
            self.device.adopt(self.indptr),
            self.indices,
            self.last,
            *SIZES,
            global_override_indptr_cpu=self.indptr,
            **self.settings,
        )


def set_attribute(name: str, value: Any) -> Callable[[ReplannedWrapper], None]:
    return lambda calls: setattr(calls, name, value)


def eager(calls: ReplannedWrapper) -> None:
    calls.wrapper = calls.library.BatchDecodeWithPagedKVCacheWrapper(
        calls.device.zeros(1 << 20, torch.uint8),
        "HND",
        use_cuda_graph=False,
        use_tensor_cores=True,
        backend="fa2",
    )


VIOLATIONS: dict[str, tuple[Callable[[ReplannedWrapper], None], str]] = {
    "never planned in full": (set_attribute("is_planned", False), "planned in full before"),
    "buffers left as they were": (set_attribute("fills", False), "fills the buffers"),
    "no graph": (eager, "only a graph's buffers"),
    "another scale": (lambda calls: calls.settings.update(sm_scale=0.5), "as it was planned"),
    "another window": (lambda calls: calls.settings.update(window_left=3), "as it was planned"),
    "another dtype": (
        lambda calls: calls.settings.update(kv_data_type=torch.float8_e4m3fn),
        "as it was planned",
    ),
    "a default": (lambda calls: calls.settings.pop("q_data_type"), "as it was planned"),
    "more sequences": (
        lambda calls: vars(calls).update(
            indptr=torch.tensor([0, 1, 2, 3], dtype=torch.int32), fills=False
        ),
        "buffers|batch size",
    ),
}


def test_a_correct_second_plan_is_accepted() -> None:
    calls = ReplannedWrapper()
    calls.run()
    assert calls.wrapper.num_plans == 2


@pytest.mark.parametrize("name", VIOLATIONS)
def test_each_violation_is_refused(name: str) -> None:
    violate, message = VIOLATIONS[name]
    calls = ReplannedWrapper()
    violate(calls)
    with pytest.raises(ContractError, match=message):
        calls.run()


def test_a_plan_before_the_previous_copy_is_refused() -> None:
    calls = ReplannedWrapper()
    calls.run()
    calls.is_planned = False
    with pytest.raises(ContractError, match="before the copy"):
        calls.run()
