"""A model in the shape of a billion parameters whose greedy answers are known: tokens in cycles.

Random weights copy nothing, so speculation of a large shape cannot be measured with them. This
model computes as much as any other of its shape and answers token t with the next one of its cycle:

    hidden size H    cycle 0: tokens 0 … H-1     cycle 1: H … 2H-1     …

The embedding of the first token of a cycle is a random vector of signs, that of the next one the
same vector, rotated by one place. All layers add zeros to the residual stream, but for the MLP of
the last one, which rotates its input, and embedding and head are one weight. With H = 2,048 a wrong
token has a logit of at most a seventh of the right one's.

    gate, up    row i       8 at input i: silu(8 x) · 8 x is 64 if that is +1, about 0 if it is -1
                row H + i   -8 at input i: the other way round
    down        row j       +1 at neuron j - 1, -1 at neuron H + j - 1
"""

import os
import shutil
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deploy.environment import HostEnvironment
from deploy.models import gguf_header
from deploy.models.lock_file import exclusive
from tests.benchmarks.synthetic import SHAPES, Shape, synthetic_file

SHAPE: Final = "1b"
CYCLE: Final = SHAPES[SHAPE].hidden_size
"""Tokens of a cycle."""
NUM_CYCLES: Final = SHAPES[SHAPE].vocab_size // CYCLE
_SHAPES: Final = {
    SHAPE: SHAPES[SHAPE],
    "draft": Shape(CYCLE, 1, 32, 8, 64, 2 * CYCLE, SHAPES[SHAPE].vocab_size, tied=True),
}
"""draft: 136 million numbers, of which the head has 101."""
_GATE: Final = 8
_BLOCK: Final = 256
Bytes = NDArray[np.uint8]


def successor(token_id: int, steps: int = 1) -> int:
    """Return the token that the model answers after `steps` tokens behind this one."""
    cycle, place = divmod(token_id, CYCLE)
    return cycle * CYCLE + (place + steps) % CYCLE


def cycles_file(environment: HostEnvironment, name: str = SHAPE, percent_right: int = 100) -> str:
    """Return the path of a model as a Q4_K_M file, written now if it does not exist.

    name: SHAPE, or "draft" for a small model that drafts for that. percent_right: of the tokens,
    those that it answers as `successor`; the others have an embedding of no cycle.
    """
    source = synthetic_file(name, "q4_k_m", "gguf", environment, _SHAPES)
    path = f"{source.removesuffix('.gguf')}-cycles-{percent_right}.gguf"
    with exclusive(path + ".lock"):
        if not os.path.exists(path):
            shutil.copyfile(source, path + ".part")
            _write_weights(path + ".part", _SHAPES[name], percent_right)
            os.replace(path + ".part", path)
    return path


def _write_weights(path: str, shape: Shape, percent_right: int) -> None:
    last = f"blk.{shape.num_layers - 1}"
    mlp = shape.intermediate_size
    written = {
        f"{last}.ffn_gate.weight": lambda: _one_hot(_detectors(mlp, CYCLE)),
        f"{last}.ffn_up.weight": lambda: _one_hot(_detectors(mlp, CYCLE)),
        f"{last}.ffn_down.weight": lambda: _signs(_rotation(CYCLE, mlp), 1.0),
        "token_embd.weight": lambda: _signs(_embeddings(NUM_CYCLES, CYCLE, percent_right), 1 / 16),
    }
    for tensor in gguf_header.read(path).tensors:
        is_zero = "attn_output" in tensor.name or "ffn_down" in tensor.name
        if tensor.name not in written and not is_zero:
            continue
        place = np.memmap(path, np.uint8, "r+", tensor.offset, (tensor.num_bytes,))
        blocks = written[tensor.name]() if tensor.name in written else np.zeros(1, np.uint8)
        place[:] = blocks.reshape(-1)
        place.flush()


def _embeddings(num_cycles: int, cycle: int, percent_right: int) -> NDArray[np.int8]:
    """Return the signs [num_cycles * cycle, cycle] of all tokens.

    A token without its place in a cycle spoils two answers: it follows none, and none follows it.
    """
    generator, signs = np.random.default_rng(0), np.array([-1, 1], np.int8)
    places = np.arange(cycle)
    first = generator.choice(signs, (num_cycles, cycle))
    embeddings = first[:, (places - places[:, None]) % cycle].reshape(-1, cycle)
    is_wrong = generator.random(len(embeddings)) > (percent_right / 100) ** 0.5
    embeddings[is_wrong] = generator.choice(signs, (int(is_wrong.sum()), cycle))
    return embeddings


def _detectors(num_neurons: int, width: int) -> NDArray[np.int8]:
    """Return the signs [num_neurons, width] of gate and up."""
    signs = np.zeros((num_neurons, width), np.int8)
    places = np.arange(width)
    signs[places, places] = 1
    signs[width + places, places] = -1
    return signs


def _rotation(width: int, num_neurons: int) -> NDArray[np.int8]:
    """Return the signs [width, num_neurons] of down."""
    signs = np.zeros((width, num_neurons), np.int8)
    places = np.arange(width)
    signs[places, (places - 1) % width] = 1
    signs[places, width + (places - 1) % width] = -1
    return signs


def _signs(signs: NDArray[np.int8], magnitude: float) -> Bytes:
    """Return Q6_K blocks of signs times a magnitude that float16 has exactly.

    128 bytes of low halves, 64 of high quarters, 16 scales, one float16; 32 stands for 0.
    """
    rows = (signs.reshape(-1, 2, 4, 32) + 32).astype(np.uint8)
    low, high = rows & 15, rows >> 4
    packed = np.zeros((len(rows), 210), np.uint8)
    packed[:, :128] = (low[:, :, :2] | low[:, :, 2:] << 4).reshape(-1, 128)
    packed[:, 128:192] = (
        high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    ).reshape(-1, 64)
    packed[:, 192:208] = 1
    packed[:, 208:] = np.frombuffer(np.float16(magnitude).tobytes(), np.uint8)
    return packed


def _one_hot(signs: NDArray[np.int8]) -> Bytes:
    """Return Q4_K blocks of signs times _GATE.

    Two float16, 12 bytes of scales and minima, 128 of halves. All scales and minima are 1: a number
    is _GATE (q - 1).
    """
    rows = (signs.reshape(-1, 4, 2, 32) + 1).astype(np.uint8)
    packed = np.zeros((len(rows), 144), np.uint8)
    packed[:, :4] = np.tile(np.frombuffer(np.float16(_GATE).tobytes(), np.uint8), 2)
    packed[:, 4:12] = 1  # of the first four scales, and of the first four minima
    packed[:, 12:16] = 0x11  # of the others
    packed[:, 16:] = (rows[:, :, 0] | rows[:, :, 1] << 4).reshape(-1, 128)
    return packed
