"""The fake FlashInfer refuses wrong merges of two attention states."""

from collections.abc import Callable

import pytest
import torch

from tests.fakes.fake_device import FakeDevice, on_host
from tests.fakes.fake_flashinfer import FakeFlashInfer
from tests.fakes.fake_paged_wrapper import ContractError
from tests.fakes.flashinfer_calls import HEAD_DIM, NUM_HEADS

MERGES: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor], str]] = {
    "on the host": (0, on_host, "v is on the device"),
    "with gaps": (2, lambda each: torch.cat((each, each), 2)[..., ::2], "v_other is contiguous"),
    "of float32": (0, torch.Tensor.float, "16 bits"),
    "log-sums of 16 bits": (1, torch.Tensor.half, "log-sums are float32"),
    "of other queries": (2, lambda each: each[:1], "one shape"),
    "log-sums of other heads": (3, lambda each: each[:, :1].contiguous(), "each head"),
}


def states() -> list[torch.Tensor]:
    """Return v, s, v_other and s_other of two queries."""
    shape = (2, NUM_HEADS, HEAD_DIM)
    results, sums = torch.randn(2, *shape).bfloat16(), torch.randn(2, *shape[:2])
    return [each for pair in zip(results, sums, strict=True) for each in pair]


@pytest.mark.parametrize("name", MERGES)
def test_wrong_merges_are_refused(name: str) -> None:
    device = FakeDevice()
    arguments = [device.adopt(each) for each in states()]
    FakeFlashInfer(device).merge_state_in_place(*arguments)
    place, change, message = MERGES[name]
    arguments[place] = change(arguments[place])
    with pytest.raises(ContractError, match=message):
        FakeFlashInfer(device).merge_state_in_place(*arguments)
