"""Attention, sampling and experts on the device against their definitions."""

import functools
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.gpu.hardware import Hardware, hardware, rehearsing
from tests.gpu.report import Report, demand
from tests.gpu.timing import read_rate
from tests.worker.reference.low_rank import packed, random_update
from tests.worker.reference.torch_kernels import draw_by_torch
from worker.cuda.layers.adapter_slots import SlotAdapters
from worker.cuda.sampling.device_sampler import DeviceDraw
from worker.cuda.transfers import QueuedTransfers
from worker.layers.adapters import AdaptedProduct, AdaptedWeight, AdapterRows
from worker.layers.experts import StackedWeights
from worker.sampling.row_params import RowParams, neutral_params, torch_columns

ROOT = Path(__file__).parents[2]
ATTENTION = "tests/worker/attention/test_flashinfer_gpu.py"
FILTERS = "tests/worker/sampling/test_device_filters_gpu.py"
OTHERS = (
    "tests/worker/attention/test_flashinfer_ragged.py",
    "tests/worker/layers/test_flashinfer_kernels_gpu.py",
    "tests/worker/layers/test_experts_gpu.py",
    "tests/worker/sampling/test_device_edits_gpu.py",
)


FILTERED_ROWS = 64
ADAPTERS = "tests/worker/adapters/test_slots_gpu.py"
QUANTISED = "tests/worker/layers/test_quantised_gpu.py"


class Outcomes:
    """A pytest plugin that reports the outcome of every test as a figure at once."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.num_passed = 0
        self.unusual: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest for set-up, call and tear-down of every test."""
        name = report.nodeid.rpartition("::")[2]
        if report.when == "call" and report.passed:
            self.num_passed += 1
            self._report.figure(name, f"passed in {report.duration:.2f} s")
        elif report.skipped:
            self.unusual.append(f"{name}: skipped")
        elif report.failed:
            self._report.error(f"{name}: {report.longreprtext[-600:]}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Called by pytest for every file."""
        if report.failed:
            self._report.error(f"{report.nodeid}: {report.longreprtext[-600:]}")


def run_tests(report: Report, words: list[str]) -> None:
    """Run tests of this checkout in this process; fails if none passes."""
    os.chdir(ROOT)
    outcomes = Outcomes(report)
    # Some hosts lack the plugins that the pytest configuration needs.
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-W",
        "ignore::pytest.PytestConfigWarning",
    ]
    status = pytest.main([*options, *words], plugins=[outcomes])
    report.figure("tests passed", outcomes.num_passed)
    demand(outcomes.num_passed > 0, f"no test passed; pytest ended with {int(status)}")
    demand(not outcomes.unusual, "; ".join(outcomes.unusual))
    demand(status == 0 or bool(report.errors), f"pytest ended with {int(status)}")


def attention(report: Report) -> None:
    """Run the tests of attention: against float64, plans ahead of the device, graphs."""
    run_tests(report, ["-m", hardware().pytest_marks, ATTENTION])


def others(report: Report) -> None:
    """Run the tests of other kernels: norms, gates, rotations, experts, logit edits."""
    if rehearsing():
        report.figure("kernels", "the strict fake has other tests for them")
        return
    run_tests(report, ["-m", hardware().pytest_marks, *OTHERS])


def filters(report: Report) -> None:
    """Run the tests of filters by kernels, and time draws by filter."""
    if not rehearsing():
        with report.part("tests"):
            run_tests(report, ["-m", hardware().pytest_marks, FILTERS])
    draws_by_filter(report, hardware())


def draws_by_filter(report: Report, gpu: Hardware) -> None:
    """Time of draws of one and of many rows over the whole vocabulary, by filter.

    The logits are normal with a deviation of 3, in bfloat16: top-p 0.9 keeps thousands of tokens.
    """
    sampling = DeviceDraw(QueuedTransfers(gpu.accelerator()), gpu.kernels().draw)
    logits = (3 * torch.randn(FILTERED_ROWS, gpu.sizes.vocab_size, device=gpu.device)).bfloat16()
    settings: dict[str, dict[str, float]] = {
        "no filter": {},
        "top-p 0.9": {"top_p": 0.9},
        "top-k 50": {"top_k": 50},
        "min-p 0.05": {"min_p": 0.05},
        "top-p 0.9, top-k 50": {"top_p": 0.9, "top_k": 50},
        "top-p 0.95, top-k 20": {"top_p": 0.95, "top_k": 20},
    }
    for count in (1, FILTERED_ROWS):
        for name, each in settings.items():
            rows = rows_of(count, 1, **each)

            def draw(rows: Any = rows, some: torch.Tensor = logits[:count]) -> torch.Tensor:
                return sampling.draw_tokens(some, rows)

            report.figure(f"{name}, {count} rows, ms", gpu.median_seconds(draw) * 1e3)
            report.figure(f"{name}, {count} rows, kernels, µs", gpu.kernel_times(draw))


def adapters(report: Report) -> None:
    """Run the tests of adapters, and time what they add to a product of 8B, in a graph.

    Reports times beside that of the product alone, without a target.
    """
    if rehearsing():
        report.figure("adapters", "the strict fake has other tests for them")
        return
    with report.part("tests"):
        run_tests(report, ["-m", hardware().pytest_marks, ADAPTERS])
    gpu, size, rank, num_adapters = hardware(), 4096, 16, 8
    dtype = torch.bfloat16
    slots = SlotAdapters(gpu.accelerator)
    slots.reserve(
        [AdaptedProduct(size, [AdaptedWeight(range(size), size)])], num_adapters, 64, dtype
    )
    owners = [
        packed(slots, random_update(size, ((rank, size),), dtype, seed))
        for seed in range(num_adapters)
    ]
    weight = torch.randn(size, size, device=gpu.device).to(dtype)
    for batch in gpu.sizes.batches:
        x = torch.randn(batch, size, device=gpu.device).to(dtype)
        product = functools.partial(F.linear, x, weight)
        y = product()
        report.figure(f"product, {batch} rows, us", gpu.median_seconds(gpu.captured(product)) * 1e6)
        slots.reserve_graphs(batch)
        for count in (1, num_adapters):
            groups = [
                AdapterRows(owner, rows := torch.arange(first, batch, count), torch.ones(len(rows)))
                for first, owner in enumerate(owners[: min(count, batch)])
            ]

            def add(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                slots.add(0, x, y)
                return y

            with slots.in_graph(batch):
                replay = gpu.captured(add)
            with slots.running(groups):
                slots.fill_graph(batch)
            seconds = gpu.median_seconds(replay)
            report.figure(f"{len(groups)} adapters, {batch} rows, us", seconds * 1e6)


def fp8_bias(report: Report) -> None:
    """Run the tests of FP8 products by rows and by blocks, with a bias."""
    if rehearsing():
        report.figure("products", "the strict fake has other tests for them")
        return
    run_tests(report, ["-m", hardware().pytest_marks, f"{QUANTISED}::test_fp8"])


def quantised(report: Report) -> None:
    """Run the tests of products with quantised weights: FP8, and codes of 4 and 8 bits."""
    if rehearsing():
        report.figure("products", "the strict fake has other tests for them")
        return
    run_tests(report, ["-m", hardware().pytest_marks, QUANTISED])


def modules(report: Report) -> None:
    """Check that every prebuilt module of the library exists and loads."""
    if rehearsing():
        report.figure("modules", "the strict fake has none")
        return
    from worker.cuda.build_flashinfer import parser, specs

    for spec in specs(parser().parse_args(["unused", "--for-tests"])):
        with report.part(spec.name):
            demand(spec.is_aot, f"no file {spec.aot_path}")
            started = time.monotonic()
            spec.load(spec.aot_path)
            report.figure(spec.name, f"loaded in {time.monotonic() - started:.2f} s")


def operators(report: Report) -> None:
    """Run every pair of torch operator and dtype that steps use."""
    from tests.gpu.operators import run_pairs

    found: dict[str, Any] = run_pairs(torch.device("cpu")) if rehearsing() else run_pairs()
    for pair, outcome in found.items():
        if outcome not in (None, "", "ok", True):
            report.error(f"{pair}: {outcome}")
    report.figure("pairs", len(found))
    demand(bool(found), "there are no pairs")


@torch.inference_mode()
def experts(report: Report) -> None:
    """Mixtures in bfloat16 against float32, and their time against reading the chosen experts once.

    Reports times and shares of the read limit, without a target.
    """
    gpu = hardware()
    rate = read_rate(gpu)
    report.figure("read GB/s", rate / 1e9)
    for num_experts, top_k, hidden, inner in gpu.sizes.experts:
        shapes = (num_experts, 2 * inner, hidden), (num_experts, hidden, inner)
        weights = [torch.randn(shape, device=gpu.device).mul_(0.02).bfloat16() for shape in shapes]
        stacked = StackedWeights(*weights)
        for name, implementation in gpu.experts(stacked).items():
            for batch in gpu.sizes.expert_batches:
                part = f"{name}, {num_experts} of {hidden}x{inner}, batch {batch}"
                with report.part(part):
                    x = torch.randn(batch, hidden, device=gpu.device).bfloat16()
                    scores = torch.rand(batch, num_experts, device=gpu.device)
                    best = scores.topk(top_k)
                    args = x, best.values / best.values.sum(1, keepdim=True), best.indices
                    error = _experts_error(stacked, implementation(*args), *args)
                    demand(error < 0.02, f"the relative error is {error:.4f}")
                    run = functools.partial(implementation, *args)
                    queued = gpu.median_seconds(run)
                    seconds = gpu.median_seconds(gpu.captured(run))
                    chosen = set(gpu.accelerator().fetch(best.indices).flatten().tolist())
                    read = len(chosen) * sum(each[0].nbytes for each in weights)
                    figures = {"us": seconds * 1e6, "share of read limit": read / rate / seconds}
                    figures["us without a graph"] = queued * 1e6
                    report.figure(part, figures | {"relative error": error})


def _experts_error(
    stacked: StackedWeights,
    found: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
) -> float:
    """Return the relative error of the first rows of a mixture."""
    gpu, rows = hardware(), min(8, len(x))
    fetch = gpu.accelerator().fetch
    total = torch.zeros(rows, x.shape[1], device=gpu.device)
    for row, experts in enumerate(fetch(chosen[:rows]).tolist()):
        for slot, expert in enumerate(experts):
            gate, up = (stacked.gate_up[expert].float() @ x[row].float()).chunk(2)
            product = stacked.down[expert].float() @ (F.silu(gate) * up)
            total[row] += weights[row, slot] * product
    exact = fetch(total)
    return float((fetch(found[:rows]).float() - exact).norm() / exact.norm())


def rows_of(count: int, seed: int, **columns: float) -> RowParams:
    """Random sampling parameters of rows with their own seeds and positions."""
    draws = np.random.default_rng(seed)
    params = neutral_params(count)
    params["seed"] = draws.integers(0, 1 << 64, count, dtype=np.uint64)
    params["position"] = draws.integers(0, 1 << 20, count, dtype=np.uint32)
    for name, value in columns.items():
        params[name] = value
    return params


def sampling(report: Report) -> None:
    """The kernel's tokens equal those of torch on the host; draws follow the distribution."""
    gpu = hardware()
    accelerator = gpu.accelerator()
    sampling = DeviceDraw(QueuedTransfers(accelerator), gpu.kernels().draw)
    logits = 3 * torch.randn(16, gpu.sizes.vocab_size, device=gpu.device)
    rows = rows_of(16, 1)
    seed, choice, position = map(
        torch.from_numpy, torch_columns(rows, ("seed", "choice", "position"))
    )
    temperature = torch.from_numpy(rows["temperature"].copy())
    wanted = draw_by_torch(accelerator.fetch(logits), temperature, seed, choice, position)
    same = int((accelerator.fetch(sampling.draw_tokens(logits, rows)) == wanted).sum())
    report.figure("draws as on the host", f"{same} of 16")
    # Logarithms may differ in the last bit, which hardly ever changes the best token.
    if same < 16:
        report.error(f"{same} of 16 draws are those of the host")
    filters: dict[str, dict[str, float]] = {
        "top-k 50": {"top_k": 50},
        "top-p 0.9, top-k 50": {"top_k": 50, "top_p": 0.9},
        "min-p 0.05": {"min_p": 0.05},
    }
    for name, settings in filters.items():
        with report.part(name):
            report.figure(name, _distribution(gpu, accelerator, sampling, settings))


def _distribution(
    gpu: Hardware, accelerator: Any, sampling: DeviceDraw, settings: dict[str, float]
) -> str:
    """Compare many draws of one row with the exact probabilities of the kept tokens."""
    num_draws, num_rows = gpu.sizes.num_draws, gpu.sizes.drawn_rows
    row = 3 * torch.randn(1, gpu.sizes.drawn_vocab, device=gpu.device)
    counts = torch.zeros(row.shape[1], dtype=torch.int64, device=gpu.device)
    wide = row.expand(num_rows, -1).contiguous()
    for turn in range(num_draws // num_rows):
        tokens = sampling.draw_tokens(wide, rows_of(num_rows, turn, **settings))
        counts += torch.bincount(tokens, minlength=row.shape[1])
    found = accelerator.fetch(counts).double().numpy()
    exact = exact_shares(accelerator.fetch(row)[0].double().numpy(), **settings)
    outside = int(found[exact == 0].sum())
    kept = exact > 0
    demand(outside == 0, f"{outside} draws of tokens that are out")
    chi, deviations = chi_square(found[kept], exact[kept] * num_draws)
    figure = f"chi² {chi:.0f} of {int(kept.sum()) - 1}"
    demand(deviations < 4, f"{figure}, {deviations:.1f} deviations")
    return figure


def chi_square(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Return chi² of counts and how many standard deviations it is above its mean.

    By Wilson and Hilferty: the cube root of chi² / k is nearly normal. 0 for a single count, which
    has no freedom.
    """
    chi = float(((found - expected) ** 2 / expected).sum())
    freedom = len(found) - 1
    if freedom == 0:
        return chi, 0.0
    spread = 2 / (9 * freedom)
    return chi, ((chi / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5


def exact_shares(
    logits: np.ndarray[Any, Any], top_k: float = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray[Any, Any]:
    """Probabilities float64 [V] after min-p, then top-k, then top-p."""
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
