"""Measure the encoding of one image by a tower of SigLIP-so400m's shape, 896 pixels a side.

In one process with the threads of a daemon: the products of its layers by themselves, which are the
limit, and the encoding of an image as a whole and in slices. Beside it llama.cpp's mtmd with random
weights of the same shape (`llama-mtmd-cli`, if it is on PATH), on the same number of threads, in
turn, round by round. Weights are bfloat16 here, float16 in llama.cpp's file.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from deploy import flags
from deploy.bench.options import BenchParser, at_least_one, writable, write
from deploy.display import open_display
from deploy.environment import HostEnvironment
from deploy.models.store import prepared_model
from proto.errors import TokendError
from tests.benchmarks.command import run
from tests.benchmarks.synthetic import TOKENIZER_OF
from worker.create_device import create_device
from worker.device import Device
from worker.layers.linear import Linear
from worker.layers.norm import Norm, NormWeight
from worker.models.vision import vision_spec
from worker.models.vision.encoder import VisionEncoder, VisionWeights
from worker.models.vision.spec import PROJECTOR, SETTINGS_KEY, TOWER, TOWER_KEY
from worker.models.vision.tile_spec import TileSpec
from worker.models.vision.tiles import TileEncoder

_HIDDEN: Final = 1152
_INNER: Final = 4304
_HEADS: Final = 16
_LAYERS: Final = 27
_PATCH: Final = 14
_TEXT_HIDDEN: Final = 576
"""Of the packaged model, which is llama.cpp's language model here."""
_PRODUCT_ROWS: Final = 256
_SLICES: Final = 40
_PEER_SECONDS: Final = 600.0
_PEER_TIME: Final = re.compile(rb"batch encoding done in (\d+) ms")


class RandomWeights(VisionWeights):
    """Random weights of a vision part, in bfloat16.

    products: of its layers in their order, each with the size of its input.
    """

    dtype = torch.bfloat16

    def __init__(self, spec: TileSpec, device: Device) -> None:
        self.device = device
        self._shapes = spec.weights()
        self._draw = torch.Generator().manual_seed(1)
        self.products: list[tuple[int, Linear]] = []

    def tensor(self, name: str) -> torch.Tensor:
        drawn = torch.randn(self._shapes[name], generator=self._draw) * 0.02
        return drawn.to(self.dtype)

    def linear(self, *names: str) -> Linear:
        weight = torch.cat([self.tensor(f"{name}.weight").flatten(1) for name in names])
        biases = [self.tensor(f"{name}.bias") for name in names if f"{name}.bias" in self._shapes]
        product = self.device.linear(weight, torch.cat(biases) if biases else None)
        if ".layers." in names[0]:
            self.products.append((weight.shape[1], product))
        return product

    def transposed_linear(self, name: str) -> Linear:
        return self.device.linear(self.tensor(name).t().contiguous())

    def norm(self, name: str, eps: float) -> Norm:
        weight, bias = self.tensor(f"{name}.weight"), self.tensor(f"{name}.bias")
        return self.device.norm(NormWeight(1 + weight, eps, True, bias))

    def rms_norm(self, name: str, eps: float) -> Norm:
        return self.device.norm(NormWeight(1 + self.tensor(f"{name}.weight"), eps))

    def centred_rms_norm(self, name: str, eps: float) -> Norm:
        return self.device.norm(NormWeight(1 + self.tensor(name + ".weight").float(), eps))


def main(words: Sequence[str]) -> None:
    """Measure, print the table, and write the figures where --json says so."""
    options = _parse(words)
    environment = HostEnvironment.of(os.environ)
    config = flags.build(flags.parse(options.serve_flags), environment.settings)
    device = create_device(config, 0)
    threads = torch.get_num_threads()
    spec = so400m(options.side)
    peer = shutil.which("llama-mtmd-cli")
    found: dict[str, list[float]] = {"products": [], "whole": [], "slices": [], "llama.cpp": []}
    with writable("--json", options.json) as files, tempfile.TemporaryDirectory() as folder:
        command = _peer_command(peer, spec, Path(folder), threads, environment) if peer else []
        weights = RandomWeights(spec, device)
        encoder = TileEncoder(spec, weights)
        pixels = torch.randn(3, options.side, options.side)
        longest = 0.0
        for _ in range(options.rounds):
            found["products"].append(product_seconds(weights, spec.most_tokens))
            found["whole"].append(sum(encoding_seconds(encoder, pixels, 1)))
            slices = encoding_seconds(encoder, pixels, _SLICES)
            found["slices"].append(sum(slices))
            longest = max(longest, *slices)
            if command:
                found["llama.cpp"].append(_peer_seconds(command))
        figures = summary(spec, found, longest, threads, str(device.kernels))
        document = {"command": "python -m tests.benchmarks.vision_tower", **figures}
        write(files, json.dumps(document, indent=2) + "\n")
    Console(width=120).print(_table(figures))


def so400m(side: int) -> TileSpec:
    """Return the arithmetic of Gemma 3's vision part, with images of this many pixels a side."""
    tower = {
        "model_type": "siglip_vision_model",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "patch_size": _PATCH,
        "image_size": side,
        "num_channels": 3,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    }
    config = {
        "hidden_size": _TEXT_HIDDEN,
        TOWER_KEY: tower,
        SETTINGS_KEY: {"mm_tokens_per_image": (side // _PATCH // 4) ** 2},
    }
    spec = vision_spec("Gemma3ForConditionalGeneration", config, {})
    assert isinstance(spec, TileSpec)
    return spec


def layer_flops(spec: TileSpec) -> tuple[float, float]:
    """Return the FLOPs of the products of all layers, and of their attention, for one image."""
    tokens = spec.most_tokens
    products = 2.0 * tokens * _LAYERS * (4 * _HIDDEN**2 + 2 * _HIDDEN * _INNER)
    return products, 4.0 * tokens**2 * _HIDDEN * _LAYERS


def product_seconds(weights: RandomWeights, tokens: int) -> float:
    """Return the seconds that the products of all layers take for this many tokens.

    Measured on some rows of each product in sequence.
    """
    inputs = {
        size: torch.randn(_PRODUCT_ROWS, size).to(weights.dtype) for size in (_HIDDEN, _INNER)
    }
    with torch.inference_mode():
        start = perf_counter()
        for size, product in weights.products:
            product(inputs[size])
        seconds = perf_counter() - start
    return seconds * tokens / _PRODUCT_ROWS


def encoding_seconds(encoder: VisionEncoder, pixels: torch.Tensor, slices: int) -> list[float]:
    """Return the seconds of each slice of the encoding of an image, all of about the same work."""
    encoding = encoder.begin(pixels)
    seconds = []
    for number in range(slices):
        start = perf_counter()
        encoding.advance((number + 1) / slices)
        seconds.append(perf_counter() - start)
    return seconds


def summary(
    spec: TileSpec, found: dict[str, list[float]], longest: float, threads: int, kernels: str
) -> dict[str, Any]:
    """Return the figures of all rounds: medians in seconds, and ratios of them."""
    products, attention = layer_flops(spec)
    medians = {name: statistics.median(each) for name, each in found.items() if each}
    rate = products / medians["products"]
    limit = (products + attention) / rate
    ratios = {"share_of_product_rate": limit / medians["whole"]}
    if "llama.cpp" in medians:
        ratios["of_llama_cpp"] = medians["whole"] / medians["llama.cpp"]
    return {
        "threads": threads,
        "kernels": kernels,
        "rounds": found,
        "seconds": medians,
        "product_gflops": rate / 1e9,
        "limit_seconds": limit,
        "longest_slice_seconds": longest,
        **ratios,
    }


def _table(figures: dict[str, Any]) -> Table:
    table = Table(
        title=f"one image; {figures['threads']} threads; products alone "
        f"{figures['product_gflops']:.0f} GFLOP/s"
    )
    for column in ("", "s", "limit / time"):
        table.add_column(column, justify="right")
    limit = figures["limit_seconds"]
    table.add_row("all FLOPs at the rate of the products", f"{limit:.2f}", "1.00")
    for name in ("whole", "slices", "llama.cpp"):
        if name in figures["seconds"]:
            seconds = figures["seconds"][name]
            table.add_row(name, f"{seconds:.2f}", f"{limit / seconds:.2f}")
    return table


# ---- llama.cpp ----


def _peer_command(
    program: str, spec: TileSpec, folder: Path, threads: int, environment: HostEnvironment
) -> list[str]:
    """Write what llama.cpp needs; return the command that encodes an image."""
    from PIL import Image

    _write_mmproj(spec, folder / "mmproj.gguf")
    side = spec.tower.image_size
    Image.effect_noise((side, side), 60).convert("RGB").save(folder / "image.png")
    with closing(open_display(sys.stderr)) as display:
        language_model = prepared_model(TOKENIZER_OF, environment, display).source
    return [
        *(program, "-m", language_model, "--mmproj", str(folder / "mmproj.gguf")),
        *("--image", str(folder / "image.png"), "-p", "x", "-n", "1", "-t", str(threads)),
        *("--no-warmup", "-c", "2048"),
    ]


def _peer_seconds(command: Sequence[str]) -> float:
    done = subprocess.run(command, capture_output=True, timeout=_PEER_SECONDS, check=False)
    found = _PEER_TIME.search(done.stdout + done.stderr)
    if found is None:
        tail = (done.stdout + done.stderr)[-500:].decode(errors="replace")
        raise TokendError(f"{command[0]} ended with {done.returncode}: {tail}")
    return int(found[1]) / 1e3


def _write_mmproj(spec: TileSpec, path: Path) -> None:
    """Write random weights as the vision part of Gemma 3, in float16, for llama.cpp."""
    import gguf
    import numpy as np

    tower = spec.tower
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type("gemma3")
    writer.add_vision_use_gelu(True)
    for key, value in (
        ("image_size", tower.image_size),
        ("patch_size", tower.patch_size),
        ("embedding_length", tower.hidden_size),
        ("feed_forward_length", tower.intermediate_size),
        ("block_count", tower.num_layers),
        ("attention.head_count", tower.num_heads),
        ("projection_dim", spec.output_size),
    ):
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", tower.norm_eps)
    for key in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{key}", [0.5, 0.5, 0.5])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, tower.num_layers)
    draw = np.random.default_rng(1)
    for own, shape in spec.weights().items():
        theirs = own.replace(TOWER, "vision_tower.vision_model.")
        theirs = theirs.replace(PROJECTOR, "multi_modal_projector.")
        theirs = theirs.replace("projection_weight", "projection.weight")
        name = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        assert name is not None, own
        is_product = len(shape) > 1 and "position" not in own
        dtype = np.float16 if is_product else np.float32
        writer.add_tensor(name, (draw.standard_normal(shape, np.float32) * 0.02).astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = BenchParser(prog="python -m tests.benchmarks.vision_tower", description=__doc__)
    parser.add_argument("--side", type=at_least_one, default=896, help="pixels (896)")
    parser.add_argument("--rounds", type=at_least_one, default=3, help="medians count (3)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    parser.add_argument("serve_flags", nargs="*", help="after --: flags of tokend serve")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(run(main))
