"""The Triton kernels compile for Hopper without a GPU.

One process compiles all kernels, because starting one takes longer than most compilations.
"""

from typing import Any

import pytest

from tests.worker.ahead_of_time import Kernel, compiled
from worker.cuda.layers.adapter_slots import INPUTS, OUTPUTS, RANKS, ROWS, SPLIT_INPUTS
from worker.cuda.sampling.device_filters import BINS, UNIT, WIDEST
from worker.cuda.sampling.device_kernels import SEEN

pytestmark = pytest.mark.suite("devices")

KV_DTYPES = [("bf16", "bf16", 0.0), ("fp16", "fp16", 0.0), ("bf16", "fp8e4nv", 448.0)]


def store(dims: tuple[int, int], dtype: str, kv_dtype: str, largest: float) -> Kernel:
    pointers = {"slots": "*i64", "key": f"*{dtype}", "value": f"*{dtype}"}
    pages = {"key_pages": f"*{kv_dtype}", "value_pages": f"*{kv_dtype}"}
    strides = ("key_stride", "value_stride", "block_stride", "head_stride", "row_stride")
    return Kernel(
        "rows.store_head",
        pointers | pages | dict.fromkeys(strides, "i32"),
        {"block_size": 16, "key_dim": dims[0], "value_dim": dims[1], "most": largest},
    )


def norm(adds: bool, centered: bool = False, biased: bool = False) -> Kernel:
    signature = dict.fromkeys(("x", "weight", "bias", "residual", "out"), "*bf16")
    signature |= {"x_stride": "i64", "heads": "i32", "size": "i32", "eps": "fp32"}
    constants = {"adds": adds, "centered": centered, "biased": biased, "block": 4096}
    return Kernel("rows.norm_row", signature, constants)


def gate(activation: str, gated: bool = True) -> Kernel:
    signature = {"gate_up": "*bf16", "out": "*bf16", "size": "i32"}
    constants = {"activation": activation, "gated": gated, "block": 1024}
    return Kernel("rows.gate_row", signature, constants)


def coded(bits: int, block_rows: int, **kind: bool) -> Kernel:
    """A product with codes; kind: has_zeros, has_table, is_float, biased, is_grouped."""
    signature = {"x": "*bf16", "codes": "*u8", "scales": "*fp16", "zeros": "*u8", "table": "*fp32"}
    signature |= {"bias": "*bf16", "out": "*bf16"}
    signature |= {"pair_rows": "*i64"} | dict.fromkeys(("experts", "firsts", "ends"), "*i32")
    sizes = ("rows", "outputs", "row_bytes", "groups", "x_stride", "out_stride")
    signature |= dict.fromkeys(sizes, "i32")
    constants = {"bits": bits, "group": 128, "has_zeros": False, "has_table": False}
    constants |= {"is_float": False, "biased": False, "is_grouped": False}
    constants |= {"block_rows": block_rows, "block_outputs": 64, "block_bytes": 64}
    return Kernel("products.multiply_tile", signature, constants | kind)


def rounding(fixed: bool) -> Kernel:
    signature = {"x": "*bf16", "codes": "*fp8e4nv", "scales": "*fp32"}
    signature |= {"x_stride": "i32", "size": "i32", "given": "fp32"}
    constants = {"fixed": fixed, "largest": 448.0, "block": 4096}
    return Kernel("rows.round_row", signature, constants)


SORTED_PAIRS = Kernel(
    "products.sort_pairs",
    {"chosen": "*i64", "rows": "*i64", "identity": "*i64", "sorted_index": "*i32"}
    | dict.fromkeys(("experts", "firsts", "ends"), "*i32")
    | dict.fromkeys(("num_pairs", "top_k", "first_expert", "num_experts", "num_blocks"), "i32"),
    {"bins": 256, "block_size": 16, "chunk_size": 1024},
)
COMBINED = Kernel(
    "products.combine",
    {"output": "*fp32", "weights": "*fp32", "sorted_index": "*i32", "total": "*fp32"}
    | {"hidden": "i32", "top_k": "i32"},
    {"block_size": 1024},
)


_SORTED_ROWS = dict.fromkeys(("rows", "slots", "firsts", "ends"), "*i32")
REDUCED_ROWS = Kernel(
    "adapters.reduce_block",
    {"x": "*bf16"}
    | _SORTED_ROWS
    | {"table": "*i64", "numbers": "*bf16", "reduced": "*fp32"}
    | dict.fromkeys(("x_stride", "table_stride", "number_stride", "entry"), "i32")
    | dict.fromkeys(("num_rows", "width", "inputs"), "i32"),
    {"block_rows": ROWS, "block_ranks": RANKS, "block_inputs": INPUTS}
    | {"split_inputs": SPLIT_INPUTS, "tiles": 4},
)
EXPANDED_ROWS = Kernel(
    "adapters.expand_block",
    {"reduced": "*fp32", "scales": "*fp32"}
    | _SORTED_ROWS
    | {"table": "*i64", "factors": "*fp32", "numbers": "*bf16", "tiles": "*i32"}
    | {"product": "*bf16", "y": "*bf16"}
    | dict.fromkeys(("product_stride", "y_stride", "table_stride", "factor_stride"), "i32")
    | dict.fromkeys(("number_stride", "entry", "factor_field", "num_rows"), "i32")
    | dict.fromkeys(("width", "weight_width", "splits", "outputs"), "i32"),
    {"block_rows": ROWS, "block_outputs": OUTPUTS, "block_ranks": RANKS},
)


_STEP = dict.fromkeys(("query_start", "sources", "again", "write_start"), "*i32")
_SEQUENCES = dict.fromkeys(("query_start", "sources", "again", "owners"), "*i32")


def recurrences() -> list[Kernel]:
    """Those of Qwen3-Next, Granite 4 and LFM2, whose inputs have 16 bits."""
    inputs = {"rows": "*bf16", "states": "*fp32"}
    writes = dict.fromkeys(("write_bases", "write_slots"), "*i32")
    sizes = ("row_stride", "slot_stride", "inputs_at", "column", "factor_column", "channels")
    scan = {"mixed": "*fp32", "gates": "*bf16", "states": "*fp32", "output": "*fp32"}
    scan |= dict.fromkeys(("decays", "time_bias"), "*fp32") | _STEP | writes
    scan |= dict.fromkeys(("gate_stride", "slot_stride", "gates_at", "heads", "parts"), "i32")
    scan |= dict.fromkeys(("channels", "num_tokens", "max_logged"), "i32")
    of_mamba = {"skip": "*fp32", "time_factor": "fp32"}
    of_mamba |= dict.fromkeys(("head_size", "heads_of_group", "groups"), "i32")
    of_delta = {"query_scale": "fp32"} | dict.fromkeys(("value_size", "key_heads"), "i32")
    tile = {"block_rows": 128, "block_columns": 16, "tile_columns": 32}
    one_warp = {"num_warps": 1}
    return [
        Kernel(
            "recurrence.begin_sequence",
            {"slot_positions": "*i32", "slot_stride": "i32"}
            | dict.fromkeys(("sources", "computed", "again"), "*i32")
            | dict.fromkeys(("write_start", "write_slots", "positions"), "*i32"),
            {},
            one_warp,
        ),
        *(
            Kernel(
                "recurrence.convolve",
                inputs
                | {"weights": "*fp32", "bias": "*fp32", "mixed": mixed}
                | _SEQUENCES
                | dict.fromkeys((*sizes, "gate_column", "num_tokens", "max_logged"), "i32"),
                {"taps": 4, "biased": biased, "activated": not multiplied}
                | {"multiplied": multiplied, "block": 256},
            )
            for mixed, biased, multiplied in (
                ("*fp32", False, False),
                ("*fp32", True, False),
                ("*bf16", True, True),
            )
        ),
        Kernel("recurrence.scan_mamba2", scan | of_mamba, tile | {"state_size": 128}, one_warp),
        Kernel(
            "recurrence.scan_delta_rule",
            scan | of_delta,
            tile | {"key_size": 128, "tiled": False},
            one_warp,
        ),
        *(
            Kernel(
                "recurrence.gate_and_norm",
                {"output": "*fp32", "rows": "*bf16", "weight": "*fp32", "owners": "*i32"}
                | {"out": "*bf16", "row_stride": "i32", "gate_column": "i32"}
                | {"gate_factor": "fp32", "width": "i32", "weight_step": "i32", "eps": "fp32"},
                {"norm_first": norm_first, "normed": normed, "block": 4096},
            )
            for norm_first, normed in ((False, True), (True, True), (False, False))
        ),
        *(
            Kernel(
                "recurrence.keep_inputs",
                inputs
                | {"gates": "*bf16", "write_ends": "*i32", "gate_stride": "i32"}
                | _STEP
                | writes
                | dict.fromkeys((*sizes, "gates_at", "numbers"), "i32"),
                {"taps": 4, "multiplied": multiplied, "block": 256},
            )
            for multiplied in (False, True)
        ),
    ]


def filters() -> list[Kernel]:
    """The kernels that find the cuts of 128,256 tokens."""
    row = {"logits": "*fp32", "temperatures": "*fp32", "rows": "*i64"}
    settings = {"top_ks": "*i64", "top_ps": "*fp64", "min_ps": "*fp64"}
    sums = {"ranges": "*fp32", "sums": "*i64"}
    found = {"keys": "*i32", "ids": "*i32"}
    sizes = {"vocab_size": "i32", "num_chunks": "i32"}
    binned = {"padded_chunks": 32, "bins": BINS}
    signatures: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
        "range_chunk": (row | sums, {"bins": BINS, "chunk_size": 4096}),
        "bins_chunk": (
            row | settings | sums,
            binned | {"widest": WIDEST, "unit": UNIT, "chunk_size": 4096},
        ),
        "collect_chunk": (
            row | settings | sums | found,
            binned | {"widest": WIDEST, "chunk_size": 4096},
        ),
        "search_row": (
            settings | sums | found | {"cuts": "*i32"},
            binned | {"unit": UNIT, "block_size": 2048},
        ),
    }
    return [
        Kernel(
            f"sampling.{name}",
            signature | sizes,
            constants,
        )
        for name, (signature, constants) in signatures.items()
    ]


EDITED_ROWS = Kernel(
    "sampling.edit_chunk",
    {"logits": "*fp32", "counts": "*i32", "words": "*i32"}
    | dict.fromkeys(("rows", "slots", "masks"), "*i64")
    | {"rules": "*fp32", "vocab_size": "i32", "num_words": "i32"},
    {"seen": SEEN, "chunk_size": 1024},
    {"enable_fp_fusion": False},
)
LISTED_EDITS = Kernel(
    "sampling.add_listed",
    {"logits": "*fp32", "indices": "*i64", "values": "*fp32"}
    | dict.fromkeys(("sources", "needed", "last"), "*i64")
    | {"count": "i32"},
    {"any_token": -1, "block_size": 128},
)


def test_the_kernels_compile_for_a_gpu() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    stores = [store((size, size), *dtypes) for size in (64, 128, 256) for dtypes in KV_DTYPES]
    stores.append(store((512, 64), "bf16", "bf16", 0.0))
    norms = [norm(False), norm(True), norm(False, centered=True), norm(True, True, biased=True)]
    gates = [gate(each) for each in ("silu", "gelu_tanh", "gelu", "sigmoid", "swiglu_oai")]
    gates += [gate(each, gated=False) for each in ("gelu_tanh", "relu2")]
    others = [*norms, *gates, *recurrences(), SORTED_PAIRS, COMBINED, EDITED_ROWS, LISTED_EDITS]
    products = [
        coded(4, 16, has_zeros=True),
        coded(4, 64, biased=True),
        coded(8, 64, has_zeros=True),
        coded(4, 16, has_table=True),
        coded(8, 64, is_float=True),
        coded(4, 16, is_grouped=True, has_zeros=True, biased=True),
        coded(8, 64, is_grouped=True, is_float=True),
        REDUCED_ROWS,
        EXPANDED_ROWS,
    ]
    roundings = [rounding(False), rounding(True)]
    made = compiled([*stores, *others, *products, *roundings, *filters()])
    found_filters, made = made[-4:], made[:-4]
    found = made[: len(stores) + len(others)]
    assert all("mma" in ptx for ptx in made[len(found) : -2])
    assert all("satfinite.e4m3" in ptx for ptx in made[-2:])
    assert ["e4m3" in ptx for ptx in found[: len(stores)]] == [False, False, True] * 3 + [False]
    assert all("div.rn.f32" in ptx for ptx in found_filters[:3]), "the host divides so"
    assert not any(kind in ptx for ptx in found_filters for kind in ("add.f32 [", "add.f64 ["))
    *_, edited_rows, listed_edits = found
    assert "fma." not in edited_rows, "the host does not fuse"
    assert "div.rn.f32" in edited_rows
    assert "atom" in listed_edits or "red." in listed_edits
