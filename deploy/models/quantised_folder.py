"""Which tensors of a Hugging Face folder make up a quantised weight.

`quantization_config` of config.json names a method, or a file of NVIDIA's modelopt beside it says
what was done. `METHODS` has for each method what its keys may be and how it packs weights;
`PACKINGS` has which tensors a packed weight consists of and what they are called. `read_scheme`
checks the configuration, `join_parts` the tensors; it returns every weight as one entry, so that
nothing behind it knows of the configuration. worker/loader/quantised.py knows what the bytes mean.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from proto.errors import ModelError, shown
from proto.messages.prepared_model import FP8, TensorEntry, TensorPart

CONFIG_KEYS: Final = ("quantization_config", "compression_config")
"""Keys of config.json that describe the quantisation; the second one is that of older files."""
MODELOPT_FILE: Final = "hf_quant_config.json"
"""File in which exports of modelopt describe the quantisation, older ones only there."""

Parts = Mapping[str, TensorPart]
Options = dict[str, float]
ReadBytes = Callable[[TensorPart], bytes]
"""Returns the bytes of a tensor that holds scales or a description of the quantisation."""
_FLOATS: Final = ("F32", "F16", "BF16")
_WORD_BITS: Final = 32
_BLOCK: Final = 32
"""Columns that kernels multiply together; groups of columns with a scale consist of them."""
_LONG_BLOCK: Final = 128
_MXFP4_BYTES: Final = 16
_NF4_BLOCK: Final = 64
_NVFP4_GROUP: Final = 16
_NVFP4_COLUMNS: Final = 64
"""Columns of a block of NVFP4 that kernels multiply with."""
_FP8_NAN: Final = 0x7F
"""The code of NaN in E4M3, without its sign."""
_NAN_EXPONENT: Final = 0xFF
_MAX_STATE_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class Scheme:
    """What a configuration says of a quantised model.

    packings: of its weights, names of PACKINGS. bits: of a code, where the tensors do not tell.
    group_sizes: columns that may share a scale; -1 for all of a row, empty for any.
    zero_offset: what is added to stored zeros.
    block: rows and columns of a block of FP8, or None.
    inputs: what products with weights in FP8 round their input by.
    """

    packings: tuple[str, ...]
    bits: int = 0
    group_sizes: tuple[int, ...] = ()
    zero_offset: int = 0
    block: tuple[int, int] | None = None
    inputs: "Inputs" = "dynamic"


Inputs = Literal["dynamic", "static", "none"]
"""How products with FP8 weights round their input: by scales of the input itself, by a scale of the
checkpoint, or not at all."""


@dataclass(frozen=True)
class Packing:
    """How a weight lies in several tensors, each with the weight's name and a suffix.

    codes: suffix and types of the tensor of the quantised numbers.
    parts: role of each other tensor, and its possible suffixes.
    optional: roles that need not be there. ignored: suffixes of tensors that nothing here needs,
        such as scales of activations. weight: suffix of the name of the whole.
    describe: returns type, shape and options of the whole, or raises _Mismatch.
    """

    codes: str
    types: tuple[str, ...]
    parts: Mapping[str, tuple[str, ...]]
    describe: "Describe"
    optional: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    weight: str = ".weight"


Described = tuple[str, tuple[int, ...], Options]
Describe = Callable[[Parts, Scheme, ReadBytes], Described]


class _Mismatch(ValueError):
    """Parts that do not fit each other; tells what would."""


def join_parts(
    scheme: Scheme | None, entries: Iterable[TensorEntry], read_bytes: ReadBytes
) -> tuple[TensorEntry, ...]:
    """Return the tensors of a folder, those of a quantised weight as one.

    scheme: of `read_scheme`. Raises ModelError naming tensors that do not fit each other.
    """
    named = {entry.name: entry for entry in entries}
    if scheme is not None:
        for name in scheme.packings:
            _join(name, scheme, named, read_bytes)
    return tuple(named.values())


def read_scheme(
    config: Mapping[str, Any], of_modelopt: Mapping[str, Any] | None = None
) -> Scheme | None:
    """Return what a folder says of the quantisation, None for nothing.

    config: of config.json. of_modelopt: of MODELOPT_FILE, which counts where config.json is silent.
    Raises ModelError naming a key and its value if this is no quantisation that is supported.
    """
    found = [key for key in CONFIG_KEYS if config.get(key)]
    if found:
        keys = _Keys(f"config.json: {found[0]}", config[found[0]])
        return METHODS[keys.one_of("quant_method", None, *METHODS)](keys)
    if not of_modelopt:
        return None
    return _modelopt(_Keys(f"{MODELOPT_FILE}: quantization", of_modelopt.get("quantization")))


class _Keys:
    """Reads keys of an object in a file; errors name file, key and value.

    Raises ModelError if `values` is no object.
    """

    def __init__(self, where: str, values: Any) -> None:
        if not isinstance(values, Mapping):
            raise ModelError(f"{where} = {shown(repr(values))}: an object is needed")
        self.where = where
        self.values = values

    def refuse(self, key: str, reason: str) -> ModelError:
        value = shown(repr(self.values.get(key)))
        return ModelError(f"{self.where}: {key} = {value}: {reason}")

    def one_of(self, key: str, default: Any, *allowed: Any) -> Any:
        """Return a value that is one of those allowed; `default` if it is missing or null."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not any(type(value) is type(each) and value == each for each in allowed):
            raise self.refuse(key, f"supported: {', '.join(map(repr, allowed))}")
        return value

    def must_be_unset(self, *keys: str) -> None:
        for key in keys:
            if self.values.get(key):
                raise self.refuse(key, "not supported")

    def block(self, key: str) -> tuple[int, int]:
        """Return rows and columns of a block, both positive."""
        block = self.values.get(key)
        if not isinstance(block, list) or len(block) != 2:
            raise self.refuse(key, "two positive numbers are needed")
        if not all(type(size) is int and size > 0 for size in block):
            raise self.refuse(key, "two positive numbers are needed")
        return block[0], block[1]

    def group_size(self) -> int:
        size = self.values.get("group_size")
        if type(size) is not int or not (size == -1 or (size > 0 and size % _BLOCK == 0)):
            raise self.refuse("group_size", f"-1 or a multiple of {_BLOCK} is needed")
        return size


def _fp8(keys: _Keys) -> Scheme:
    keys.one_of("fmt", "e4m3", "e4m3")
    inputs = keys.one_of("activation_scheme", "dynamic", "dynamic", "static")
    if keys.values.get("weight_block_size") is None:
        return Scheme(("fp8",), inputs=inputs)
    return Scheme(("fp8",), block=keys.block("weight_block_size"), inputs=inputs)


def _awq(keys: _Keys) -> Scheme:
    keys.one_of("version", "gemm", "gemm", "GEMM")
    bits = keys.one_of("bits", None, 4)
    keys.one_of("zero_point", True, True)
    return Scheme(("awq",), bits, (keys.group_size(),))


def _gptq(keys: _Keys) -> Scheme:
    keys.must_be_unset("dynamic")  # other settings for some modules
    keys.one_of("desc_act", False, False, True)
    keys.one_of("sym", True, False, True)
    bits = keys.one_of("bits", None, 4, 8)
    # the first version stores zeros less 1
    offset = keys.one_of("checkpoint_format", "gptq", "gptq", "gptq_v2") == "gptq"
    return Scheme(("gptq",), bits, (keys.group_size(),), zero_offset=int(offset))


def _bitsandbytes(keys: _Keys) -> Scheme:
    keys.must_be_unset("load_in_8bit", "_load_in_8bit")
    keys.one_of("bnb_4bit_quant_type", "fp4", "nf4", "fp4")
    keys.one_of("bnb_4bit_quant_storage", "uint8", "uint8")
    return Scheme(("nf4",))


def _modelopt(keys: _Keys) -> Scheme:
    keys.must_be_unset("kv_cache_scheme", "kv_cache_quant_algo")
    if keys.one_of("quant_algo", None, "FP8", "NVFP4") == "FP8":
        return Scheme(("fp8",), inputs="static")
    keys.one_of("group_size", _NVFP4_GROUP, _NVFP4_GROUP)
    return Scheme(("modelopt_nvfp4",))


_COMPRESSED: Final = {
    "pack-quantized": "rows",
    "nvfp4-pack-quantized": "compressed_nvfp4",
    "int-quantized": "int8",
    "float-quantized": "fp8",
    "naive-quantized": "fp8",
    "dense": None,
}
"""Format of compressed-tensors → packing."""
_NUMBERS: Final[Mapping[str, tuple[str, tuple[int, ...]]]] = {
    "compressed_nvfp4": ("float", (4,)),
    "fp8": ("float", (8,)),
    "rows": ("int", (4, 8)),
}
"""Packing → kind and bits that its numbers may have; other packings have integers of 8 bits."""


def _compressed_tensors(keys: _Keys) -> Scheme:
    keys.must_be_unset("kv_cache_scheme", "transform_config")
    keys.one_of("quantization_status", "compressed", "compressed", "frozen")
    sparsity = keys.values.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise keys.refuse("sparsity_config", "sparse weights are not supported")
    whole = keys.one_of("format", "dense", *_COMPRESSED, "mixed-precision")
    groups = keys.values.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise keys.refuse("config_groups", "an object of groups is needed")
    packings, sizes, blocks = [], set(), set()
    inputs: set[Inputs] = set()
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise keys.refuse("config_groups", f"{shown(name)} has no weights")
        of_group = _Keys(f"{keys.where}: {shown(name)}", group)
        of_weights = _Keys(f"{keys.where}: {shown(name)}.weights", weights)
        kind = of_group.one_of("format", whole, *_COMPRESSED)
        if kind == "mixed-precision":
            raise of_group.refuse("format", "the format of the group is needed")
        packing = _COMPRESSED[kind]
        number, bits = _NUMBERS.get(packing or "", ("int", (8,)))
        of_weights.one_of("type", "int", number)
        of_weights.one_of("num_bits", None, *bits)
        if packing == "compressed_nvfp4":
            of_weights.one_of("strategy", None, "tensor_group")
            of_weights.one_of("group_size", None, _NVFP4_GROUP)
            of_weights.one_of("symmetric", True, True)
            packings.append(packing)
            continue
        strategy = of_weights.one_of("strategy", "tensor", "tensor", "channel", "group", "block")
        if strategy == "group":
            sizes.add(of_weights.group_size())
        elif strategy == "block":
            blocks.add(of_weights.block("block_structure"))
        else:
            sizes.add(-1)
        if packing is not None:
            packings.append(packing)
        inputs.add(_inputs(group))
    if len(blocks) > 1:
        raise keys.refuse("config_groups", "blocks of one size are supported")
    return Scheme(
        tuple(dict.fromkeys(packings)),
        0,
        tuple(sizes),
        block=next(iter(blocks), None),
        # Which group a weight is of is not read: where groups differ no input is rounded.
        inputs=inputs.pop() if len(inputs) == 1 else "none",
    )


def _inputs(group: Mapping[str, Any]) -> Inputs:
    """Return how a group of compressed-tensors rounds inputs; "none" for weights alone."""
    inputs = group.get("input_activations")
    if not isinstance(inputs, Mapping):
        return "none"
    return "static" if inputs.get("dynamic") is False else "dynamic"


METHODS: Final[Mapping[str, Callable[[_Keys], Scheme]]] = {
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "fbgemm_fp8": lambda keys: Scheme(("fp8",)),
    "fp8": _fp8,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "mxfp4": lambda keys: Scheme(("mxfp4",)),
}
"""quant_method → what its other keys say."""


def _join(
    packing_name: str, scheme: Scheme, named: dict[str, TensorEntry], read_bytes: ReadBytes
) -> None:
    """Replace the tensors of each weight with this packing by one."""
    packing = PACKINGS[packing_name]
    for name, codes in list(named.items()):
        if not name.endswith(packing.codes) or codes.type not in packing.types:
            continue
        base = name.removesuffix(packing.codes)
        found = {"codes": codes}
        for role, suffixes in packing.parts.items():
            there = [named[base + suffix] for suffix in suffixes if base + suffix in named]
            if there:
                found[role] = there[0]
            elif role not in packing.optional:
                raise ModelError(f"tensor {name} has no {base}{suffixes[0]} beside it")
        weight = base + packing.weight
        if weight != name and weight in named:
            raise ModelError(f"tensor {name} and tensor {weight} are the same weight")
        parts = {
            role: TensorPart(each.type, each.shape, each.file, each.offset, each.num_bytes)
            for role, each in found.items()
        }
        try:
            kind, shape, options = packing.describe(parts, scheme, read_bytes)
        except _Mismatch as reason:
            listed = ", ".join(
                f"{each.name} {each.type} {list(each.shape)}" for each in found.values()
            )
            raise ModelError(f"the tensors of {weight} do not fit: {reason} ({listed})") from None
        for role, each in found.items():
            if role not in ("codes", "order", "shape", "state", "zeros"):
                _check_finite(each, packing_name, read_bytes(parts[role]))
        for each in found.values():
            del named[each.name]
        for suffix in packing.ignored:
            named.pop(base + suffix, None)
        num_bytes = sum(part.num_bytes for part in parts.values())
        named[weight] = TensorEntry(
            weight, kind, shape, codes.file, codes.offset, num_bytes, packing_name, parts, options
        )


def _check_finite(entry: TensorEntry, packing: str, raw: bytes) -> None:
    """Raise ModelError naming the tensor if a scale, or a number of a table, is NaN or infinite."""
    import numpy as np

    if entry.type == "BF16":
        numbers = (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
    elif entry.type in _FLOATS:
        numbers = np.frombuffer(raw, {"F32": "<f4", "F16": "<f2"}[entry.type])
    else:
        codes = np.frombuffer(raw, "u1")
        if entry.type == FP8:
            is_nan = codes & _FP8_NAN == _FP8_NAN
        else:  # exponents of MXFP4; all others are codes of scales
            is_nan = (codes == _NAN_EXPONENT) & (packing == "mxfp4")
        numbers = np.full(int(is_nan.any()), np.nan)
    wrong = numbers[~np.isfinite(numbers)]
    if wrong.size:
        raise ModelError(f"tensor {entry.name} holds {wrong[0]:g}, and scales weights")


def _need(is_true: bool, what: str) -> None:
    if not is_true:
        raise _Mismatch(what)


def _columns_of_group(columns: int, num_groups: int, scheme: Scheme) -> int:
    """Return the columns that share a scale."""
    sizes = [columns if size == -1 else size for size in scheme.group_sizes]
    _need(num_groups > 0 and columns % num_groups == 0, f"{num_groups} groups of {columns} columns")
    group = columns // num_groups
    names = " or ".join(map(str, sizes))
    _need(not sizes or group in sizes, f"{columns} columns are not groups of {names}")
    return group


def _integer_type(bits: int, columns: int, group: int) -> str:
    """Return the type of weights whose groups have a scale and a zero each.

    The number in it is that of columns that a kernel reads with one scale. Without one the weight
    is converted while it is read.
    """
    for block in (_LONG_BLOCK, _BLOCK):
        if columns % block == 0 and group % block == 0:
            return f"INT{bits}_{block}"
    return f"INT{bits}"


def _describe_gptq(parts: Parts, scheme: Scheme, read_bytes: ReadBytes) -> Described:
    bits, codes, scales, zeros = scheme.bits, parts["codes"], parts["scales"], parts["zeros"]
    _need(len(codes.shape) == len(scales.shape) == 2, "matrices are needed")
    columns, rows = codes.shape[0] * _WORD_BITS // bits, codes.shape[1]
    groups = scales.shape[0]
    _check_words(zeros, (groups, rows * bits // _WORD_BITS))
    _check_floats(scales, (groups, rows))
    if "order" in parts:
        _need(parts["order"].shape == (columns,), f"g_idx has {columns} numbers")
        _need(parts["order"].type == "I32", "g_idx is I32")
    group = _columns_of_group(columns, groups, scheme)
    options: Options = {"bits": bits, "group": group, "zero_offset": scheme.zero_offset}
    return _integer_type(bits, columns, group), (rows, columns), options


def _describe_awq(parts: Parts, scheme: Scheme, read_bytes: ReadBytes) -> Described:
    bits, codes, scales, zeros = scheme.bits, parts["codes"], parts["scales"], parts["zeros"]
    _need(len(codes.shape) == len(scales.shape) == 2, "matrices are needed")
    columns, rows = codes.shape[0], codes.shape[1] * _WORD_BITS // bits
    groups = scales.shape[0]
    _check_words(zeros, (groups, codes.shape[1]))
    _check_floats(scales, (groups, rows))
    group = _columns_of_group(columns, groups, scheme)
    return (_integer_type(bits, columns, group), (rows, columns), {"bits": bits, "group": group})


def _describe_rows(parts: Parts, scheme: Scheme, read_bytes: ReadBytes) -> Described:
    """Codes packed along rows; their bits follow from the stored shape of the weight."""
    codes, scales = parts["codes"], parts["scales"]
    _need(len(codes.shape) == 2, "a matrix is needed")
    shape = parts["shape"]
    size = {"I64": 8, "I32": 4}.get(shape.type, 0)
    _need(shape.shape == (2,) and size > 0, "the shape is two whole numbers")
    raw = read_bytes(shape)
    rows, columns = (int.from_bytes(raw[at : at + size], "little") for at in (0, size))
    per_word = columns // codes.shape[1] if codes.shape[1] else 0
    _need(
        codes.shape[0] == rows and columns == codes.shape[1] * per_word and per_word in (4, 8),
        f"shape {[rows, columns]} needs whole words of 4 or 8 codes",
    )
    bits = _WORD_BITS // per_word
    group = _scale_columns(scales, rows, columns, scheme)
    if "zeros" in parts:
        _check_words(parts["zeros"], (-(-rows // per_word), columns // group))
    if "order" in parts:
        _need(parts["order"].shape == (columns,), f"g_idx has {columns} numbers")
    options: Options = {"bits": bits, "group": group}
    return _integer_type(bits, columns, group), (rows, columns), options


def _describe_int8(parts: Parts, scheme: Scheme, read_bytes: ReadBytes) -> Described:
    codes = parts["codes"]
    _need(len(codes.shape) == 2, "a matrix is needed")
    rows, columns = codes.shape
    group = _scale_columns(parts["scales"], rows, columns, scheme)
    zeros = parts.get("zeros")
    if zeros is not None:
        _need(zeros.type == "I8", "zeros are I8")
        _need(zeros.shape == parts["scales"].shape, "each scale has a zero")
    return _integer_type(8, columns, group), (rows, columns), {"bits": 8, "group": group}


def _scale_columns(scales: TensorPart, rows: int, columns: int, scheme: Scheme) -> int:
    """Return the columns that share one of these scales: one in all, one a row, one a group."""
    if scales.shape in ((), (1,)):
        _check_floats(scales, scales.shape)
        return columns
    _need(len(scales.shape) == 2, "scales are a matrix")
    _check_floats(scales, (rows, scales.shape[1]))
    return _columns_of_group(columns, scales.shape[1], scheme)


def _describe_fp8(parts: Parts, scheme: Scheme, read_bytes: ReadBytes) -> Described:
    codes, scales = parts["codes"], parts["scales"]
    _need(len(codes.shape) == 2, "a matrix is needed")
    rows, columns = codes.shape
    inputs = {f"{scheme.inputs}_inputs": 1.0}
    if "inputs" in parts:
        _need(parts["inputs"].shape in ((), (1,)), "one scale of the input is needed")
        _need(parts["inputs"].type in _FLOATS, "scales are floats")
    if scheme.block is not None:
        block_rows, block_columns = scheme.block
        blocks = (-(-rows // block_rows), -(-columns // block_columns))
        _need(
            scales.shape == blocks and scales.type in _FLOATS,
            f"a scale of each block of {block_rows} x {block_columns} is needed",
        )
        return FP8, codes.shape, {"rows": block_rows, "columns": block_columns} | inputs
    _need(
        scales.shape in ((), (1,), (rows,), (rows, 1)) and scales.type in _FLOATS,
        "one scale, or one of each row, is needed",
    )
    each_row = scales.shape not in ((), (1,)) or rows == 1
    return FP8, codes.shape, {"rows": 1 if each_row else rows, "columns": columns} | inputs


def _describe_nf4(parts: Parts, scheme: Scheme, read_bytes: ReadBytes) -> Described:
    """4 bits as places in a table, with a scale of each block of consecutive numbers."""
    state_part = parts["state"]
    _need(state_part.num_bytes <= _MAX_STATE_BYTES, "the state is too long")
    try:
        state = json.loads(read_bytes(state_part))
        shape = tuple(int(size) for size in state["shape"])
        block = int(state["blocksize"])
        is_nested = "nested_blocksize" in state
        nested = float(state["nested_blocksize"]) if is_nested else 0.0
        offset = float(state["nested_offset"]) if is_nested else 0.0
        kind = str(state["quant_type"])
    except (ValueError, TypeError, KeyError, AttributeError):
        raise _Mismatch("the state is no JSON object of a quantisation") from None
    _need(len(shape) == 2 and min(shape) > 0 and block > 0, "a matrix in blocks is needed")
    rows, columns = shape
    _need(math.isfinite(offset), "the offset of the scales is no finite number")
    _need(parts["codes"].num_bytes == -(-rows * columns // 2), f"codes of shape {list(shape)}")
    num_blocks = -(-rows * columns // block)
    _need(parts["scales"].shape == (num_blocks,), f"{num_blocks} scales")
    _need(parts["table"].shape == (16,) and parts["table"].type == "F32", "a table of 16 F32")
    options: Options = {"block": block}
    if is_nested:
        _need("nested_scales" in parts and "nested_table" in parts, "scales of scales")
        _need(parts["nested_table"].shape == (256,), "a table of 256 F32")
        _need(parts["scales"].type == "U8", "scales are U8")
        _need(nested > 0, "a block of scales is needed")
        options |= {"nested_block": nested, "nested_offset": offset}
    else:
        _need(parts["scales"].type == "F32", "scales are F32")
    is_packed = kind == "nf4" and columns % block == 0 and block % _NF4_BLOCK == 0
    return "NF4" if is_packed else "FOUR_BITS", shape, options


def _describe_mxfp4(parts: Parts, scheme: Scheme, read_bytes: ReadBytes) -> Described:
    codes, scales = parts["codes"], parts["scales"]
    _need(
        len(codes.shape) > 2
        and scales.type == "U8"
        and (*scales.shape, _MXFP4_BYTES) == codes.shape,
        "they are not MXFP4",
    )
    return "MXFP4", (*codes.shape[:-2], codes.shape[-2] * 2 * _MXFP4_BYTES), {}


def _describe_nvfp4(parts: Parts, scheme: Scheme, read_bytes: ReadBytes) -> Described:
    codes, scales = parts["codes"], parts["scales"]
    _need(len(codes.shape) == 2, "a matrix is needed")
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    groups = (rows, columns // _NVFP4_GROUP)
    _need(
        columns % _NVFP4_GROUP == 0 and scales.shape == groups and scales.type == FP8,
        f"a scale in FP8 of each {_NVFP4_GROUP} columns is needed",
    )
    of_all = parts["factor" if "factor" in parts else "divisor"]
    _need(of_all.shape in ((), (1,)) and of_all.type == "F32", "one scale of all in F32 is needed")
    is_packed = columns % _NVFP4_COLUMNS == 0
    return "NVFP4" if is_packed else "FOUR_BITS", (rows, columns), {"group": _NVFP4_GROUP}


def _check_floats(part: TensorPart, shape: Sequence[int]) -> None:
    _need(part.shape == tuple(shape), f"scales of shape {list(shape)} are needed")
    _need(part.type in _FLOATS, "scales are floats")


def _check_words(part: TensorPart, shape: Sequence[int]) -> None:
    _need(part.shape == tuple(shape), f"zeros of shape {list(shape)} are needed")
    _need(part.type == "I32", "zeros are I32")


_BESIDES: Final = (".input_zero_point", ".output_scale", ".input_scale_ub")
_ACTIVATIONS: Final = (".input_scale", *_BESIDES)
_STATE: Final = ".quant_state.bitsandbytes__"

PACKINGS: Final[Mapping[str, Packing]] = {
    "awq": Packing(
        ".qweight", ("I32",), {"scales": (".scales",), "zeros": (".qzeros",)}, _describe_awq
    ),
    "compressed_nvfp4": Packing(
        ".weight_packed",
        ("U8",),
        {"scales": (".weight_scale",), "divisor": (".weight_global_scale",)},
        _describe_nvfp4,
        ignored=(".input_global_scale",),
    ),
    "fp8": Packing(
        ".weight",
        (FP8,),
        {
            "scales": (".weight_scale_inv", ".weight_scale"),
            "inputs": (".input_scale", ".activation_scale"),
        },
        _describe_fp8,
        optional=("inputs",),
        ignored=_BESIDES,
    ),
    "gptq": Packing(
        ".qweight",
        ("I32",),
        {"scales": (".scales",), "zeros": (".qzeros",), "order": (".g_idx",)},
        _describe_gptq,
        optional=("order",),
    ),
    "int8": Packing(
        ".weight",
        ("I8",),
        {"scales": (".weight_scale",), "zeros": (".weight_zero_point",)},
        _describe_int8,
        optional=("zeros",),
        ignored=_ACTIVATIONS,
    ),
    "modelopt_nvfp4": Packing(
        ".weight",
        ("U8",),
        {"scales": (".weight_scale",), "factor": (".weight_scale_2",)},
        _describe_nvfp4,
        ignored=_ACTIVATIONS,
    ),
    "mxfp4": Packing("_blocks", ("U8",), {"scales": ("_scales",)}, _describe_mxfp4, weight=""),
    "nf4": Packing(
        ".weight",
        ("U8",),
        {
            "scales": (".weight.absmax",),
            "table": (".weight.quant_map",),
            "nested_scales": (".weight.nested_absmax",),
            "nested_table": (".weight.nested_quant_map",),
            "state": (f".weight{_STATE}nf4", f".weight{_STATE}fp4"),
        },
        _describe_nf4,
        optional=("nested_scales", "nested_table"),
    ),
    "rows": Packing(
        ".weight_packed",
        ("I32",),
        {
            "scales": (".weight_scale",),
            "zeros": (".weight_zero_point",),
            "order": (".weight_g_idx",),
            "shape": (".weight_shape",),
        },
        _describe_rows,
        optional=("zeros", "order"),
        ignored=_ACTIVATIONS,
    ),
}
"""Packing → the tensors of a weight."""
