"""Write a Hugging Face folder of a real size with random weights in seconds."""

import json
import math
import re
from pathlib import Path
from typing import Any, Final

import torch

from tests.fakes.tiny_model_files import END, tokenizer_json
from worker.models.registry import spec_from_config

_BLOCK: Final = 64 << 20
"""Bytes of random numbers, which follow each other again and again."""


def write_checkpoint(folder: Path, config: dict[str, Any], num_heard: int | None = None) -> None:
    """config.json, a small tokenizer and model.safetensors in bfloat16.

    num_heard: layers after which the others add nothing, so that a model of only these, written
    here, too, has the same logits; None: all of them.

    Norms are ones: with small norm weights all logits would be nearly equal, and the best token
    would depend on rounding.
    """
    spec = spec_from_config(config)
    header: dict[str, Any] = {}
    ones: list[tuple[int, int]] = []
    zeros: list[tuple[int, int]] = []
    end = 0
    for weight in spec.weights().values():
        begin, end = end, end + 2 * math.prod(weight.shape)
        if len(weight.shape) == 1:
            ones.append((begin, weight.shape[0]))
        layer = re.search(r"layers\.(\d+)\..*(?:o_proj|down_proj)", weight.hugging_face)
        if layer and num_heard is not None and int(layer[1]) >= num_heard:
            zeros.append((begin, end - begin))
        header[weight.hugging_face] = {
            "dtype": "BF16",
            "shape": list(weight.shape),
            "data_offsets": [begin, end],
        }
    # Grammars need an end token.
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": END}))
    (folder / "tokenizer_config.json").write_text("{}")
    tokenizer = json.loads(tokenizer_json())
    # Every token of the model has a text: without one no event is sent, and times mean nothing.
    vocab = tokenizer["model"]["vocab"]
    vocab |= {f"Ġ{number}": number for number in range(max(vocab.values()) + 1, spec.vocab_size)}
    # Grammars need the decoder of the tokenizer.
    decoder = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer["decoder"] = {"type": "ByteLevel", **decoder}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    words = json.dumps(header).encode()
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(_BLOCK // 2, generator=generator).mul_(0.02).bfloat16()
    block = values.view(torch.uint8).numpy().data
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        start = file.tell()
        for begin in range(0, end, _BLOCK):
            file.write(block[: min(_BLOCK, end - begin)])
        for begin, count in zeros:
            file.seek(start + begin)
            file.write(bytes(count))
        for begin, count in ones:
            file.seek(start + begin)
            file.write(torch.ones(count).bfloat16().view(torch.uint8).numpy().data)
