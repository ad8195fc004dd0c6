"""Tiny checkpoints quantised as Hugging Face folders have them, and the numbers they stand for.

Those of compressed-tensors are packed by its own package. The packages of the other formats do not
install beside ours: their blocks are written here from the formats' definitions, by loops over
words where the loader splits bytes.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from proto.messages.prepared_model import FP8

Tensors = dict[str, torch.Tensor]
Quantise = Callable[[torch.Tensor, torch.Generator], tuple[Tensors, torch.Tensor]]
"""A weight [rows, columns] to the tensors stored for it, by suffix, and its float32 numbers."""
NF4: Final = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
FP4: Final = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The numbers of E2M1 without their sign."""
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs the i-th 4 bits of a word of AWQ belong to."""


@dataclass(frozen=True)
class Scheme:
    """A way to quantise. config: quantization_config. block_type: of the weights that kernels
    multiply; "" if they are converted instead."""

    config: dict[str, Any]
    quantise: Quantise
    block_type: str = ""


def _groups(
    weight: torch.Tensor, bits: int, group: int, dtype: torch.dtype, symmetric: bool
) -> Any:
    """Round to codes with a scale and a zero of each group of columns: [rows, groups, …] each."""
    rows, columns = weight.shape
    size = columns if group == -1 else group
    each = weight.float().view(rows, -1, size)
    top = 2**bits - 1
    if symmetric:
        scales = (each.abs().amax(2, keepdim=True) / (top // 2)).clamp_min(1e-6)
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        low, high = each.amin(2, keepdim=True).clamp_max(0), each.amax(2, keepdim=True).clamp_min(0)
        scales = ((high - low) / top).clamp_min(1e-6)
        zeros = (-low / scales).round().clamp(0, top)
    scales = scales.to(dtype)
    codes = (each / scales.float() + zeros).round().clamp(0, top)
    numbers = scales.float() * (codes - zeros)
    return (
        codes.view(rows, columns).long(),
        scales.view(rows, -1),
        zeros.view(rows, -1).long(),
        numbers.view(rows, columns),
    )


def _words(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack codes along the last dimension into int32 words, lowest bits first."""
    per_word = 32 // bits
    each = codes.view(*codes.shape[:-1], -1, per_word)
    words = torch.zeros(each.shape[:-1], dtype=torch.int64)
    for place in range(per_word):
        words |= each[..., order[place] if order else place] << bits * place
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int().contiguous()


def awq(group: int) -> Scheme:
    def quantise(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros, numbers = _groups(weight, 4, group, torch.float16, False)
        stored = {
            ".qweight": _words(codes.t().contiguous(), 4, _AWQ_ORDER),
            ".qzeros": _words(zeros.t().contiguous(), 4, _AWQ_ORDER),
            ".scales": scales.t().contiguous(),
        }
        return stored, numbers

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    config |= {"version": "gemm", "modules_to_not_convert": None}
    return Scheme(config, quantise, f"INT4_{128 if group == 128 else 32}")


def gptq(
    bits: int, group: int, *, symmetric: bool, desc_act: bool = False, version: str = "gptq"
) -> Scheme:
    def quantise(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        columns = weight.shape[1]
        size = columns if group == -1 else group
        order = torch.arange(columns)
        if desc_act:  # the same for all weights with the same input
            order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
        codes, scales, zeros, sorted_numbers = _groups(
            weight[:, order], bits, group, torch.float16, symmetric
        )
        in_file, numbers = torch.empty_like(codes), torch.empty_like(sorted_numbers)
        groups = torch.empty(columns, dtype=torch.int32)
        in_file[:, order], numbers[:, order] = codes, sorted_numbers
        groups[order] = (torch.arange(columns) // size).int()
        zeros = (zeros - int(version == "gptq")) % 2**bits
        stored = {
            ".qweight": _words(in_file.contiguous(), bits).t().contiguous(),
            ".qzeros": _words(zeros.t().contiguous(), bits),
            ".scales": scales.t().contiguous(),
            ".g_idx": groups,
        }
        return stored, numbers

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric}
    config |= {"desc_act": desc_act, "checkpoint_format": version, "damp_percent": 0.01}
    return Scheme(config, quantise, f"INT{bits}_{32 if group == 32 else 128}")


def fp8(
    block: tuple[int, int] | None, *, name: str = ".weight_scale_inv", per_row: bool = False
) -> Scheme:
    """block: rows and columns that share a scale; None for all of them, or those of a row."""

    def quantise(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        high, wide = block or (1 if per_row else rows, columns)
        shape = -(-rows // high), -(-columns // wide)
        scales = torch.rand(shape, generator=generator) * 0.01 + 0.005
        each = scales.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        codes = (weight.float() / each).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored_scales = scales if block or per_row else scales.view(())
        return {".weight": codes, name: stored_scales}, codes.float() * each

    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    if block:
        config["weight_block_size"] = list(block)
    return Scheme(config, quantise, FP8)


def modelopt_fp8() -> Scheme:
    """One scale of each weight, and one of its input."""

    def quantise(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        stored, numbers = fp8(None, name=".weight_scale").quantise(weight, generator)
        return stored | {".input_scale": torch.tensor(0.03)}, numbers

    return Scheme({"quant_method": "modelopt", "quant_algo": "FP8"}, quantise, FP8)


def bitsandbytes(*, nested: bool, kind: str = "nf4") -> Scheme:
    def quantise(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        blocks = weight.float().reshape(-1, 64)
        largest = blocks.abs().amax(1)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float32"}
        state["shape"] = list(weight.shape)
        stored: Tensors = {".weight.quant_map": NF4.clone()}
        if nested:
            offset = float(largest.mean())
            table = torch.linspace(-1, 1, 256)
            count = -(-len(largest) // 256)
            padded = torch.zeros(count * 256)
            padded[: len(largest)] = largest - offset
            of_scales = padded.view(count, 256).abs().amax(1).clamp_min(1e-8)
            wanted = padded.view(count, 256) / of_scales[:, None]
            places = (wanted[..., None] - table).abs().argmin(-1)
            scales = (table[places] * of_scales[:, None] + offset).view(-1)[: len(largest)]
            state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
            stored[".weight.absmax"] = places.view(-1)[: len(largest)].to(torch.uint8)
            stored[".weight.nested_absmax"] = of_scales
            stored[".weight.nested_quant_map"] = table
        else:
            scales = stored[".weight.absmax"] = largest
        codes = ((blocks / scales.clamp_min(1e-8)[:, None])[..., None] - NF4).abs().argmin(-1)
        numbers = (NF4[codes] * scales[:, None]).view(weight.shape)
        pairs = codes.view(-1, 2)
        stored[".weight"] = (pairs[:, 0] << 4 | pairs[:, 1]).to(torch.uint8)[:, None]
        text = json.dumps(state).encode()
        stored[f".weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(
            list(text), dtype=torch.uint8
        )
        return stored, numbers

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    config |= {"bnb_4bit_use_double_quant": nested, "bnb_4bit_quant_storage": "uint8"}
    return Scheme(config, quantise, "NF4" if kind == "nf4" else "")


def compressed_tensors(form: str, weights: dict[str, Any], block_type: str = "") -> Scheme:
    """Packed and unpacked by the package itself. weights: its QuantizationArgs."""

    def quantise(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams

        args = QuantizationArgs(**weights)
        rows, columns = weight.shape
        match weights["strategy"]:
            case "group":
                each = weight.view(rows, -1, weights["group_size"])
            case "channel":
                each = weight.view(rows, 1, columns)
            case "block":
                high, wide = weights["block_structure"]
                shape = rows // high, high, columns // wide, wide
                each = weight.view(shape).transpose(1, 2).flatten(2)
            case _:
                each = weight.view(1, 1, -1)
        scale, zero = calculate_qparams(each.amin(-1), each.amax(-1), args)
        if weights["strategy"] == "tensor":
            scale, zero = scale.view(1), zero.view(1)
        tensors = {"weight": weight.float(), "weight_scale": scale, "weight_zero_point": zero}
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        compressor = BaseCompressor.get_value_from_registry(form)
        packed = compressor.compress(tensors, scheme)
        numbers = compressor.decompress(dict(packed), scheme)["weight"].float()
        return {f".{name}": each for name, each in packed.items()}, numbers

    each_token = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    inputs = each_token if block_type == FP8 else None
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "input_activations": inputs, "weights": weights}
        },
    }
    return Scheme(config, quantise, block_type)


def nvfp4(*, is_modelopt: bool) -> Scheme:
    """4 bits in groups of 16, packed by compressed-tensors; modelopt's tensors have other names."""

    def quantise(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        largest = weight.float().view(len(weight), -1, 16).abs().amax(2)
        of_all = 448 * 6 / largest.amax().view(1)
        scales = (largest / 6 * of_all).to(torch.float8_e4m3fn)
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
        compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
        tensors = {"weight": weight.float(), "weight_scale": scales.float()}
        packed = compressor.compress(tensors | {"weight_global_scale": of_all}, scheme)
        own, stored_of_all = {f".{name}": each for name, each in packed.items()}, 1 / of_all
        if is_modelopt:
            own = {".weight": own[".weight_packed"], ".weight_scale": own[".weight_scale"]}
            own |= {".weight_scale_2": stored_of_all[0], ".input_scale": torch.tensor(0.02)}
            each_group = scales.float() * stored_of_all
        else:
            own[".input_global_scale"] = torch.tensor([300.0])
            each_group = scales.float() / of_all
        numbers = torch.empty_like(weight, dtype=torch.float32)
        for half, codes in enumerate((packed["weight_packed"] & 15, packed["weight_packed"] >> 4)):
            magnitudes = FP4[codes.long() & 7]
            numbers[:, half::2] = torch.where(codes > 7, -magnitudes, magnitudes)
        numbers *= each_group.repeat_interleave(16, 1)
        unpacked = compressor.decompress(dict(packed), scheme)["weight"]
        assert torch.allclose(unpacked.float(), numbers, rtol=2**-7, atol=0)
        return own, numbers

    args = _args("float", 4, "tensor_group", group_size=16)
    if is_modelopt:
        return Scheme(
            {
                **{"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
                **{"ignore": ["lm_head"], "producer": {"name": "modelopt", "version": "0.37"}},
            },
            quantise,
            "NVFP4",
        )
    config = compressed_tensors("nvfp4-pack-quantized", args).config
    return Scheme(config, quantise, "NVFP4")


def _args(kind: str, bits: int, strategy: str, **others: Any) -> dict[str, Any]:
    return {"type": kind, "num_bits": bits, "symmetric": True, "strategy": strategy} | others


SCHEMES: Final = {
    "awq 128": awq(128),
    "awq 64": awq(64),
    "awq 32": awq(32),
    "gptq sym": gptq(4, 128, symmetric=True),
    "gptq asym v2": gptq(4, 32, symmetric=False, version="gptq_v2"),
    "gptq rows": gptq(4, -1, symmetric=False),
    "gptq desc_act": gptq(4, 128, symmetric=False, desc_act=True),
    "gptq 8": gptq(8, 128, symmetric=True),
    "w4a16": compressed_tensors(
        "pack-quantized", _args("int", 4, "group", group_size=128), "INT4_128"
    ),
    "w4a16 asym": compressed_tensors(
        "pack-quantized", _args("int", 4, "group", group_size=32, symmetric=False), "INT4_32"
    ),
    "w8a8": compressed_tensors("int-quantized", _args("int", 8, "channel"), "INT8_128"),
    "fp8 channel": compressed_tensors("float-quantized", _args("float", 8, "channel"), FP8),
    "fp8 tensor": compressed_tensors("float-quantized", _args("float", 8, "tensor"), FP8),
    "fp8 blocks": fp8((128, 128)),
    "fp8 rows": fp8(None, name=".weight_scale", per_row=True),
    "fp8 one scale": fp8(None, name=".weight_scale"),
    "modelopt fp8": modelopt_fp8(),
    "nf4": bitsandbytes(nested=False),
    "nf4 nested": bitsandbytes(nested=True),
    "nvfp4": nvfp4(is_modelopt=False),
    "nvfp4 modelopt": nvfp4(is_modelopt=True),
}


def quantise_folder(
    folder: Path,
    scheme: Scheme,
    plain: Path | None = None,
    is_quantised: Callable[[str], bool] = lambda name: name.endswith("_proj.weight"),
) -> Tensors:
    """Quantise the weights of a checkpoint in place; return the numbers by name.

    plain: a checkpoint that gets the numbers instead.
    """
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(folder / "model.safetensors")
    stored, numbers = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if weight.dim() == 2 and is_quantised(name):
            del stored[name]
            parts, numbers[name] = scheme.quantise(weight, generator)
            base = name.removesuffix(".weight")
            stored |= {base + suffix: part.contiguous() for suffix, part in parts.items()}
    save_file(stored, folder / "model.safetensors")
    if plain is not None:
        save_file(numbers, plain / "model.safetensors")
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": scheme.config})
    )
    return numbers
