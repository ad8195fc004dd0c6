"""Attention and sampling on the device, against what defines them."""

import subprocess
import sys
from typing import Any

import numpy as np
import torch

from tests.gpu.phases import Failed, demand
from tests.gpu.timing import CUDA
from worker.device.accelerator import Cuda
from worker.device.placement import OnDevice
from worker.sample.device_draw import TritonDraw, draw_by_torch
from worker.sample.device_sampling import DeviceSampling, DrawnRows

NUM_DRAWS = 1 << 20
ROWS = 256
VOCAB_SIZE = 128256


def attention() -> dict[str, Any]:
    """The tests marked gpu: kernels against float64, plans ahead of the device, graphs."""
    words = ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/worker"]
    result = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    *_, last = result.stdout.strip().splitlines() or [""]
    if result.returncode:
        raise Failed(f"{last}\n{result.stdout[-4000:]}{result.stderr[-2000:]}")
    return {"tests": last}


def rows_of(count: int, seed: int, **settings: float) -> DrawnRows:
    """Settings of rows with seeds and positions of their own."""
    draws = np.random.default_rng(seed)
    fields = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | settings
    return DrawnRows(
        np.full(count, fields["temperature"], np.float32),
        np.full(count, fields["top_k"], np.int32),
        np.full(count, fields["top_p"], np.float32),
        np.full(count, fields["min_p"], np.float32),
        draws.integers(0, 1 << 64, count, dtype=np.uint64),
        np.zeros(count, np.uint32),
        draws.integers(0, 1 << 20, count, dtype=np.uint32),
    )


def sampling() -> dict[str, Any]:
    """The kernel's tokens are those of torch on the host; draws follow the distribution."""
    sampling = DeviceSampling(OnDevice(Cuda(CUDA)), TritonDraw())
    logits = 3 * torch.randn(16, VOCAB_SIZE, device=CUDA)
    rows = rows_of(16, 1)
    keys = [
        torch.from_numpy(each.astype(np.int64))
        for each in (rows.seed.view(np.int64), rows.choice, rows.position)
    ]
    wanted = draw_by_torch(logits.cpu(), torch.from_numpy(rows.temperature), *keys)
    same = int((sampling.tokens(logits, rows).cpu() == wanted).sum())
    # The logarithms of two machines may differ in the last bit, hardly ever the best score.
    demand(same == 16, f"{same} of 16 draws are those of the host")
    figures: dict[str, Any] = {"draws as on the host": f"{same} of 16"}
    for name, settings in {
        "top-k 50": {"top_k": 50},
        "top-p 0.9, top-k 50": {"top_k": 50, "top_p": 0.9},
        "min-p 0.05": {"min_p": 0.05},
    }.items():
        figures[name] = _distribution(sampling, settings)
    return figures


def _distribution(sampling: DeviceSampling, settings: dict[str, float]) -> str:
    """Draws of one row often, against the exact probabilities of what the filters keep."""
    row = 3 * torch.randn(1, 8192, device=CUDA)
    counts = torch.zeros(row.shape[1], dtype=torch.int64, device=CUDA)
    wide = row.expand(ROWS, -1).contiguous()
    for turn in range(NUM_DRAWS // ROWS):
        tokens = sampling.tokens(wide, rows_of(ROWS, turn, **settings))
        counts += torch.bincount(tokens, minlength=row.shape[1])
    found = counts.double().cpu().numpy()
    exact = exact_shares(row[0].double().cpu().numpy(), **settings)
    outside = int(found[exact == 0].sum())
    kept = exact > 0
    expected = exact[kept] * NUM_DRAWS
    chi = float(((found[kept] - expected) ** 2 / expected).sum())
    freedom = int(kept.sum()) - 1
    # Wilson and Hilferty: the cube root of chi² / k is nearly normal.
    deviations = ((chi / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    demand(outside == 0, f"{outside} draws of tokens that are out")
    demand(deviations < 4, f"chi² {chi:.0f} of {freedom}, {deviations:.1f} deviations")
    return f"chi² {chi:.0f} of {freedom}"


def exact_shares(
    logits: np.ndarray[Any, Any], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray[Any, Any]:
    """Probabilities float64 [V] of what is left by min-p, then top-k, then top-p."""
    shares = np.exp(logits - logits.max())
    shares[shares < min_p * shares.max()] = 0
    order = np.argsort(-shares, kind="stable")
    if top_k:
        shares[order[int(top_k) :]] = 0
    shares /= shares.sum()
    if top_p < 1:
        reached = np.cumsum(shares[order])
        shares[order[int((reached < top_p).sum()) + 1 :]] = 0
        shares /= shares.sum()
    return shares
