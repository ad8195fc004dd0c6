"""The Triton kernels compile for Hopper without a GPU.

One process compiles all kernels, because starting one takes longer than most compilations.
"""

import pytest

from tests.worker.ahead_of_time import Kernel, compiled
from worker.sampling.device_kernels import SEEN

KV_DTYPES = [("bf16", "bf16", 0.0), ("fp16", "fp16", 0.0), ("bf16", "fp8e4nv", 448.0)]


def store(dims: tuple[int, int], dtype: str, kv_dtype: str, largest: float) -> Kernel:
    pointers = {"slots": "*i64", "key": f"*{dtype}", "value": f"*{dtype}"}
    pages = {"key_pages": f"*{kv_dtype}", "value_pages": f"*{kv_dtype}"}
    strides = ("key_stride", "value_stride", "block_stride", "head_stride", "row_stride")
    return Kernel(
        "worker.attention.kv_store:TritonStore",
        pointers | pages | dict.fromkeys(strides, "i32"),
        {"block_size": 16, "key_dim": dims[0], "value_dim": dims[1], "most": largest},
    )


def norm(adds: bool, centered: bool = False, biased: bool = False) -> Kernel:
    signature = dict.fromkeys(("x", "weight", "bias", "residual", "out"), "*bf16")
    signature |= {"x_stride": "i64", "heads": "i32", "size": "i32", "eps": "fp32"}
    constants = {"adds": adds, "centered": centered, "biased": biased, "block": 4096}
    return Kernel("worker.layers.triton_kernels:_norm_kernel", signature, constants)


def gate(gelu: bool, gated: bool = True, clamped: bool = False) -> Kernel:
    signature = {"gate_up": "*bf16", "out": "*bf16", "size": "i32"}
    constants = {"gelu": gelu, "clamped": clamped, "gated": gated, "block": 1024}
    return Kernel("worker.layers.triton_kernels:_gate_kernel", signature, constants)


EDITED_ROWS = Kernel(
    "worker.sampling.device_kernels:_rows_kernel",
    {"logits": "*fp32", "counts": "*i32", "words": "*i32"}
    | dict.fromkeys(("rows", "slots", "masks"), "*i64")
    | {"rules": "*fp32", "vocab_size": "i32", "num_words": "i32"},
    {"seen": SEEN, "block": 1024},
    {"enable_fp_fusion": False},
)
LISTED_EDITS = Kernel(
    "worker.sampling.device_kernels:_listed_kernel",
    {"logits": "*fp32", "indices": "*i64", "values": "*fp32"}
    | dict.fromkeys(("sources", "needed", "last"), "*i64")
    | {"count": "i32"},
    {"any_token": -1, "block": 128},
)


def test_the_kernels_compile_for_a_gpu() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    stores = [store((size, size), *dtypes) for size in (64, 128, 256) for dtypes in KV_DTYPES]
    stores.append(store((512, 64), "bf16", "bf16", 0.0))
    norms = [norm(False), norm(True), norm(False, centered=True), norm(True, True, biased=True)]
    gates = [gate(False), gate(True), gate(True, gated=False), gate(False, clamped=True)]
    others = [*norms, *gates, EDITED_ROWS, LISTED_EDITS]
    found = compiled([*stores, *others])
    assert ["e4m3" in ptx for ptx in found[: len(stores)]] == [False, False, True] * 3 + [False]
    *_, edited_rows, listed_edits = found
    assert "fma." not in edited_rows, "the host does not fuse"
    assert "div.rn.f32" in edited_rows
    assert "atom" in listed_edits or "red." in listed_edits
