"""The signatures of the fake FlashInfer agree with the installed library.

The backend's calls run on the fake, so its signatures are the ones relied on. The library imports
without a GPU; if it is not installed the comparison is skipped:
pip install --no-deps flashinfer-python==VERSION apache-tvm-ffi nvidia-ml-py einops
"""

import importlib.metadata
import inspect
import operator
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.fake_flashinfer import FakeDecode, FakeFlashInfer, FakePrefill
from tests.fakes.fake_fp8 import FakeGemm
from tests.fakes.fake_latent_wrapper import FakeLatent
from tests.fakes.fake_ragged_wrapper import FakeRagged
from worker.cuda.attention.flashinfer import load_library
from worker.cuda.flashinfer_library import VERSION

PREFILL = "BatchPrefillWithPagedKVCacheWrapper"
DECODE = "BatchDecodeWithPagedKVCacheWrapper"
RAGGED = "BatchPrefillWithRaggedKVCacheWrapper"
LATENT = "BatchMLAPagedAttentionWrapper"
CALLS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "making a prefill": (FakeFlashInfer.BatchPrefillWithPagedKVCacheWrapper, PREFILL, "__init__"),
    "making a decode": (FakeFlashInfer.BatchDecodeWithPagedKVCacheWrapper, DECODE, "__init__"),
    "planning a prefill": (FakePrefill.plan, PREFILL, "plan"),
    "its memory": (FakeDecode.reset_workspace_buffer, DECODE, "reset_workspace_buffer"),
    # Its plan takes keywords as **kwargs, because positional arguments are deprecated.
    "planning a decode": (FakeDecode.plan, DECODE, "_plan_impl"),
    "running a prefill": (FakePrefill.run, PREFILL, "run"),
    "running a decode": (FakeDecode.run, DECODE, "run"),
    "making one for latents": (FakeFlashInfer.BatchMLAPagedAttentionWrapper, LATENT, "__init__"),
    "planning latents": (FakeLatent.plan, LATENT, "plan"),
    "running latents": (FakeLatent.run, LATENT, "run"),
    "planning a decode again": (FakeFlashInfer.fast_decode_plan, "fast_decode_plan", ""),
    "a norm": (FakeFlashInfer.rmsnorm, "rmsnorm", ""),
    "a gate": (FakeFlashInfer.silu_and_mul, "silu_and_mul", ""),
    "another gate": (FakeFlashInfer.gelu_tanh_and_mul, "gelu_tanh_and_mul", ""),
    "turning": (
        FakeFlashInfer.apply_rope_with_cos_sin_cache_inplace,
        "apply_rope_with_cos_sin_cache_inplace",
        "",
    ),
    "making a ragged one": (
        FakeFlashInfer.BatchPrefillWithRaggedKVCacheWrapper,
        RAGGED,
        "__init__",
    ),
    "planning texts": (FakeRagged.plan, RAGGED, "plan"),
    "running texts": (FakeRagged.run, RAGGED, "run"),
    "merging": (FakeFlashInfer.merge_state_in_place, "merge_state_in_place", ""),
    "blocks in FP8": (FakeGemm.fp8_blockscale_gemm_sm90, "gemm.fp8_blockscale_gemm_sm90", ""),
}
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
KEYWORD = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def differences(ours: inspect.Signature, theirs: inspect.Signature) -> list[str]:
    """List why a call that fits `ours` would fail or differ with `theirs`."""
    found = []
    places = [each.name for each in theirs.parameters.values() if each.kind in POSITIONAL]
    for place, (name, own) in enumerate(ours.parameters.items()):
        other = theirs.parameters.get(name)
        if other is None:
            found.append(f"{name} is gone")
        elif own.kind in POSITIONAL and places[place : place + 1] != [name]:
            found.append(f"{name} is not at place {place}")
        elif own.kind not in POSITIONAL and other.kind not in KEYWORD:
            found.append(f"{name} has no name any more")
        elif own.default is not own.empty and own.default != other.default:
            found.append(f"{name} is {other.default!r} by default, not {own.default!r}")
    taken = ours.parameters
    for name, other in theirs.parameters.items():
        variable = other.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if name not in taken and other.default is other.empty and not variable:
            found.append(f"{name} must be given")
    return found


@pytest.mark.parametrize("call", CALLS)
def test_the_library_accepts_calls_that_the_fake_accepts(call: str) -> None:
    try:
        found = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"flashinfer-python {VERSION} is not installed")
    assert found == VERSION, "the extra gpu and the facts of the fake name one version"
    fake, wrapper, method = CALLS[call]
    real = operator.attrgetter(wrapper)(load_library())
    ours = inspect.signature(fake)
    if method:
        real = getattr(real, method)
    else:
        ours = ours.replace(parameters=list(ours.parameters.values())[1:])
    assert differences(ours, inspect.signature(real)) == []


def test_the_comparison_finds_changed_parameters() -> None:
    def ours(self: object, a: int, b: int = 1, *, c: int, d: int = 2, e: int = 3) -> None: ...

    def theirs(self: object, b: int, a: int, f: int, /, c: int, *, e: int = 4) -> None: ...

    assert differences(inspect.signature(ours), inspect.signature(theirs)) == [
        "a is not at place 1",
        "b is not at place 2",
        "d is gone",
        "e is 4 by default, not 3",
        "f must be given",
    ]
    assert differences(inspect.signature(ours), inspect.signature(ours)) == []


def test_the_gpu_extra_pins_the_version_of_the_backend() -> None:
    root = Path(__file__).parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert f"flashinfer-python=={VERSION}" in project["optional-dependencies"]["gpu"]
    assert "flashinfer" not in (root / "constraints.txt").read_text()
    pinned = (root / "constraints-gpu.txt").read_text().splitlines()
    assert set(project["optional-dependencies"]["gpu"]) <= set(pinned)
