"""A Hugging Face folder of a real size with random weights, written in seconds."""

import json
import math
from pathlib import Path
from typing import Any, Final

import torch

from tests.fakes.tiny_model_files import tokenizer_json
from worker.loader.names import name_in_file
from worker.models.registry import spec_from_config
from worker.models.spec import parameter_shapes

_BLOCK: Final = 64 << 20
"""Bytes of random numbers, which follow each other again and again."""


def write_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """config.json, a small tokenizer and model.safetensors in bfloat16."""
    spec = spec_from_config(config)
    header: dict[str, Any] = {}
    end = 0
    for name, shape in parameter_shapes(spec).items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name_in_file("safetensors", name)] = {
            "dtype": "BF16",
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    words = json.dumps(header).encode()
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(_BLOCK // 2, generator=generator).mul_(0.02).bfloat16()
    block = values.view(torch.uint8).numpy().data
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        for begin in range(0, end, _BLOCK):
            file.write(block[: min(_BLOCK, end - begin)])
