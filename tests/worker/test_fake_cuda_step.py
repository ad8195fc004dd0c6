"""Steps of every model family on "cuda": no mixed devices, no waits, only known operators.

Runs without a GPU; tests/gpu/operators.json lists the operators to run on one.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.fakes.fake_cuda_step import (
    CUDA,
    FakeAccelerator,
    FakeLibrary,
    HotPath,
    HotPathError,
    Launches,
    run_steps,
    seen_operators,
    watched,
)
from tests.gpu import operators
from worker.attention.kv_cache import KVCache
from worker.cuda.async_runner import CudaModelRunner


@pytest.fixture
def watch() -> Iterator[HotPath]:
    with warnings.catch_warnings():
        # Addresses of fake tensors, which are passed to no kernel.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        with watched() as watch:
            yield watch


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=CUDA)


VIOLATIONS: dict[str, Callable[[], Any]] = {
    "a matrix of the host": lambda: zeros(2, 2) @ torch.zeros(2, 2),
    "places of the host": lambda: zeros(4)[torch.zeros(2, dtype=torch.int64)],
    "a number": lambda: zeros(1).item(),
    "a list": lambda: zeros(2).tolist(),
    "a condition": lambda: bool(zeros(1) > 0),
    "a copy to the host": lambda: zeros(2).cpu(),
    "a copy from the host": lambda: torch.zeros(2).to(CUDA),
    "a tensor of numbers": lambda: torch.tensor([1, 2], device=CUDA),
    "a new tensor of numbers": lambda: zeros(1).new_tensor([1, 2]),
    "a copy that is waited for": lambda: zeros(2).copy_(torch.zeros(2)),
    "nonzero": lambda: zeros(2).nonzero(),
    "a mask": lambda: zeros(2)[zeros(2) > 0],
    "repeats to be counted": lambda: zeros(2).repeat_interleave(zeros(2, dtype=torch.int64)),
    "a kernel on the host": lambda: Launches()[1](zeros(2), torch.zeros(2)),
    "a plan on the device": lambda: Launches(on_host=(0,))(zeros(2)),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_mixed_devices_and_waits_are_refused(name: str, watch: HotPath) -> None:
    with watch, pytest.raises(HotPathError):
        VIOLATIONS[name]()


def test_calls_of_a_step_are_accepted(watch: HotPath) -> None:
    memory = FakeAccelerator(watch).pinned(8)
    with watch:
        zeros(8, dtype=torch.uint8).copy_(memory, non_blocking=True)
        zeros(2).mul_(torch.tensor(2.0))
    assert ("aten.mul_.Tensor", ("float32", "float32")) in watch.calls


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (
            CudaModelRunner,
            "_fill_pending",
            lambda self, ids, rows: torch.where(ids.cpu() < 0, 0, ids),
        ),
        (KVCache, "copy_blocks", lambda self, a, b: torch.tensor([1, 2], device=CUDA)),
    ],
    ids=["tokens through the host", "block ids from a list"],
)
def test_a_fault_in_a_step_is_found(
    owner: type,
    name: str,
    broken: Callable[..., Any],
    watch: HotPath,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(HotPathError):
        run_steps(watch, "llama")


def test_experts_on_hopper_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    num_rows: list[int] = []

    class Counted(Launches):
        def __call__(self, *args: Any, **settings: Any) -> None:
            num_rows.append(len(args[0]))
            super().__call__(*args, **settings)

    monkeypatch.setattr(FakeLibrary, "cutlass_fused_moe", Counted())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        with watched(is_hopper=True) as watch:
            run_steps(watch, "mixtral", num_steps=2, enforce_eager=True)
    assert num_rows


@pytest.mark.suite("rehearsal")
def test_the_stored_operators_are_those_of_all_families() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        found = operators.text_of(seen_operators())
    stored = operators.FILE.read_text()
    assert found == stored, "stale: run python -m tests.gpu.operators --write"


def test_every_stored_call_is_valid() -> None:
    """Run on a CPU, which has nearly all of the operators."""
    found = operators.run_pairs(torch.device("cpu"))
    assert len(found) > 80
    assert {name: error for name, error in found.items() if error != "ok"} == {}


def test_a_missing_operator_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    tensor = {"tensor": [2], "dtype": "float8_e4m3fn", "device": "cuda"}
    index = {"tensor": [1], "dtype": "int64", "device": "cuda"}
    call = {
        "operator": "aten.index_copy.default",
        "dtypes": ["float8_e4m3fn", "int64", "float8_e4m3fn"],
        "args": [tensor, 0, index, tensor | {"tensor": [1]}],
        "kwargs": {},
    }
    monkeypatch.setattr(operators, "FILE", tmp_path / "operators.json")
    operators.FILE.write_text(operators.text_of([call]))
    name = "aten.index_copy.default(float8_e4m3fn, int64, float8_e4m3fn)"
    (error,) = operators.run_pairs(torch.device("cpu")).items()
    assert error[0] == name
    assert "Float8_e4m3fn" in error[1]
