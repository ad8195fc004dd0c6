"""Small GGUF files: any tensors, plain or in random blocks of any type."""

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

PLAIN = ("F32", "F16", "BF16")
QUANTISED = (
    *("Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4"),
    *("Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S"),
    *("IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "NVFP4"),
)
_SCALES: dict[str, tuple[float, tuple[int, ...]]] = {
    "Q8_0": (1e-3, (0,)),
    "Q5_0": (1e-2, (0,)),
    "Q5_1": (1e-2, (0, 2)),
    "Q4_0": (1e-2, (0,)),
    "Q4_1": (1e-2, (0, 2)),
    "Q4_K": (3e-4, (0, 2)),
    "Q5_K": (2e-4, (0, 2)),
    "Q6_K": (5e-5, (208,)),
    "Q2_K": (4e-3, (80, 82)),
    "Q3_K": (2e-3, (108,)),
    "IQ4_NL": (5e-4, (0,)),
    "IQ4_XS": (2e-5, (0,)),
    "IQ1_S": (2e-2, (0,)),
    "IQ2_XXS": (2e-3, (0,)),
    "IQ2_XS": (2e-3, (0,)),
    "IQ2_S": (2e-3, (0,)),
    "IQ3_XXS": (7e-4, (0,)),
    "IQ3_S": (6e-4, (0,)),
    "TQ1_0": (1e-1, (52,)),
    "TQ2_0": (1e-1, (64,)),
}
"""Magnitude and offsets of the float16 scales of a block."""

Bytes = npt.NDArray[np.uint8]


def random_rows(kind: str, rows: int, columns: int, seed: int) -> Bytes:
    """Return the bytes of a tensor [rows, columns] of a GGUF type, with weights well below 1."""
    random = np.random.default_rng(seed)
    if kind in PLAIN:
        values = random.standard_normal((rows, columns)).astype(np.float32) * 0.1
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]).view(np.uint8)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (rows * columns // block_size, block_bytes), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = random.integers(120, 123, len(blocks), dtype=np.uint8)
        return blocks.reshape(rows, -1)
    if kind == "NVFP4":
        blocks[:, :4] = random.integers(1, 20, (len(blocks), 4), dtype=np.uint8)
        return blocks.reshape(rows, -1)
    if kind == "IQ1_M":
        scales = random.uniform(-2e-2, 2e-2, len(blocks)).astype(np.float16)
        put_iq1_m_scales(blocks, scales)
        return blocks.reshape(rows, -1)
    size, offsets = _SCALES[kind]
    for offset in offsets:
        scales = (random.uniform(-size, size, len(blocks))).astype(np.float16)
        blocks[:, offset : offset + 2] = scales[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)


def put_iq1_m_scales(blocks: Bytes, scales: npt.NDArray[np.float16]) -> None:
    """Write the float16 scales, 4 bits in the highest ones of each of the last four words."""
    bits = scales.view(np.uint16)
    for part in range(4):
        high = blocks[:, 49 + 2 * part]
        high[:] = (high & 15) | ((bits >> 4 * part & 15) << 4).astype(np.uint8)


def numbers(kind: str, rows: Bytes) -> npt.NDArray[np.float32]:
    """Return the weights that the bytes encode, decoded by the gguf package."""
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind]).astype(np.float32)


def permute_heads(rows: npt.NDArray[np.generic], num_heads: int) -> npt.NDArray[np.generic]:
    """Return the rows of a query or key projection in llama.cpp's order.

    Its converter puts row i of the first half of a head before row i of the second.
    """
    half = rows.shape[0] // num_heads // 2
    order = [
        head * 2 * half + part * half + i
        for head in range(num_heads)
        for i in range(half)
        for part in (0, 1)
    ]
    return rows[order]


def write(
    path: Path,
    tensors: Mapping[str, tuple[str, npt.NDArray[np.generic]]],
    add_metadata: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> None:
    """Write a GGUF file. tensors: type, and rows of bytes or float32 numbers, by name.

    add_metadata: adds the model's sizes and its tokenizer, for a test that reads them.
    """
    writer = gguf.GGUFWriter(path, "llama")
    add_metadata(writer)
    for name, (kind, data) in tensors.items():
        if kind == "F32" and data.dtype == np.float32:
            writer.add_tensor(name, data)
        else:
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
