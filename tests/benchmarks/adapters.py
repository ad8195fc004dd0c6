"""Measure what adapters cost a worker's steps, in turns with the same steps without them.

A worker like the daemon's, without engine and front end: 16 sequences of 256 tokens that decode 128
more, or of other sizes by flags, with random adapters on all products. The cases take turns, so all
see the same load of the machine. Where other programs use it, `--cpu-time` with one thread counts
the time of this process. tests/benchmarks/served_adapters.py measures whole daemons.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Final

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from deploy import flags
from deploy.bench.options import BenchParser, at_least_one
from deploy.display import open_display
from deploy.environment import HostEnvironment
from deploy.models.store import prepared_model
from proto.codec import changed
from proto.messages.lora import LoadAdapter
from proto.messages.prepared_model import PreparedModel
from proto.messages.scheduler_output import NewRequestData
from proto.settings.config import LoRAConfig, ServeConfig
from tests.benchmarks.command import run
from tests.benchmarks.messages import StepWorkload
from tests.benchmarks.steps_program import BenchWorker, Steps
from worker.loader.adapters.tensors import ModulePlaces
from worker.models.registry import model_spec
from worker.step.adapter_store import AdapterStore

_ROWS: Final = 16
_SLICE: Final = 3
"""Decode steps of a case in a round."""


@dataclass(frozen=True)
class Case:
    """One kind of step. ids: the adapters of the sequences; 0: none. has_lora: --enable-lora."""

    name: str
    has_lora: bool
    ids: tuple[int, ...]


def cases(num_adapters: int) -> list[Case]:
    """Return the cases, that of the base model first."""
    several = tuple(1 + row % num_adapters for row in range(_ROWS))
    return [
        Case("base", False, (0,) * _ROWS),
        Case("no adapter, --enable-lora", True, (0,) * _ROWS),
        Case("one adapter", True, (1,) * _ROWS),
        Case(f"{num_adapters} adapters", True, several),
        Case("one of 16 requests has one", True, (1, *(0,) * (_ROWS - 1))),
    ]


class AdaptedSteps(Steps):
    """Steps whose sequences have adapters."""

    def __init__(self, worker: BenchWorker, workload: StepWorkload, ids: tuple[int, ...]) -> None:
        self._ids = ids
        super().__init__(worker, workload)

    def _new(self, row: int, num_computed: int, num_scheduled: int) -> NewRequestData:
        new = super()._new(row, num_computed, num_scheduled)
        return changed(new, lora_int_id=self._ids[row])


def write_adapter(folder: Path, prepared: PreparedModel, rank: int, seed: int) -> None:
    """Save random numbers as an adapter of all dense products, in bfloat16."""
    spec = model_spec(prepared, ServeConfig())
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, places in ModulePlaces(spec, "safetensors").modules:
        weight = places[0].weight
        if places[0].stack is not None or not weight.name.startswith("layers."):
            continue
        rows, columns = weight.shape
        down = torch.randn(rank, columns, generator=generator) / columns**0.5
        up = 0.02 * torch.randn(rows, rank, generator=generator)
        prefix = f"base_model.model.{module}"
        tensors[f"{prefix}.lora_A.weight"] = down.bfloat16()
        tensors[f"{prefix}.lora_B.weight"] = up.bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def load_adapter(store: AdapterStore, path: Path, number: int) -> float:
    """Load an adapter by the store's thread; return the seconds."""
    started = perf_counter()
    store.begin_load(LoadAdapter(1, number, str(path)))
    while not (answers := store.take_finished()):
        pass
    assert answers[0].error is None, answers[0].error
    return perf_counter() - started


def main(words: Sequence[str]) -> None:
    """Measure, print the table, and write the figures where --json says so."""
    options = _parse(words)
    around = HostEnvironment.of(os.environ)
    config = flags.build(flags.parse(options.serve_flags), around.settings)
    if config.device.cpu_threads:
        torch.set_num_threads(config.device.cpu_threads)
    with closing(open_display(sys.stderr)) as display:
        prepared = prepared_model(config.model.model, around, display)
    workers = {
        has_lora: BenchWorker(_with_lora(config, has_lora), prepared) for has_lora in (False, True)
    }
    store = workers[True].loaded.adapters
    assert store is not None
    with tempfile.TemporaryDirectory(prefix="tokend-adapters-") as folder:
        loads = []
        for number in range(1, options.adapters + 1):
            path = Path(folder) / str(number)
            write_adapter(path, prepared, options.rank, number)
            loads.append(load_adapter(store, path, number))
    found = _measure(
        options, config, prepared, workers, process_time if options.cpu_time else perf_counter
    )
    found["load_s_median"] = statistics.median(loads)
    sizes = f"{options.input_tokens} tokens in, {options.output_tokens} out"
    Console(width=120).print(_table(found, sizes))
    print(f"an adapter of rank {options.rank} is loaded in {found['load_s_median']:.3f} s")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n")
    store.close()


def _with_lora(config: ServeConfig, has_lora: bool) -> ServeConfig:
    return changed(config, lora=changed(LoRAConfig(), enable_lora=has_lora))


def _measure(
    options: argparse.Namespace,
    config: ServeConfig,
    prepared: PreparedModel,
    workers: dict[bool, BenchWorker],
    clock: Callable[[], float],
) -> dict[str, object]:
    """Run the cases in turns; return milliseconds, and ratios to the base model."""
    workload = StepWorkload(
        config=config,
        model=prepared,
        num_rows=_ROWS,
        context_tokens=options.input_tokens,
        warm_up_steps=0,
        measured_steps=_SLICE * options.rounds + 1,
    )
    every = cases(options.adapters)
    alone = changed(workload, num_rows=1)
    running = [
        (
            AdaptedSteps(workers[case.has_lora], workload, case.ids).run_decodes,
            AdaptedSteps(workers[case.has_lora], alone, case.ids[:1]).run_prompts,
        )
        for case in every
    ]
    decodes: list[list[float]] = [[] for _ in every]
    prompts: list[list[float]] = [[] for _ in every]
    for _ in range(options.rounds):
        for number, (decode, prompt) in enumerate(running):
            decodes[number] += [_seconds(decode, clock) for _ in range(_SLICE)]
            prompts[number].append(_seconds(prompt, clock))
    typical = [
        (_typical(ours), _typical(theirs)) for ours, theirs in zip(decodes, prompts, strict=True)
    ]
    return {
        "cases": [
            _row(case, of_case, typical[0], options.output_tokens)
            for case, of_case in zip(every, typical, strict=True)
        ]
    }


def _seconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
    started = clock()
    work()
    return clock() - started


def _typical(samples: list[float]) -> float:
    """Return the tenth percentile: what other programs take is above it."""
    return sorted(samples)[len(samples) // 10]


def _row(
    case: Case, of_case: tuple[float, float], of_base: tuple[float, float], num_outputs: int
) -> dict[str, object]:
    def all_requests(seconds: tuple[float, float]) -> float:
        decode, prompt = seconds
        return num_outputs * decode + _ROWS * prompt

    return {
        "case": case.name,
        "decode_ms": 1e3 * of_case[0],
        "prompt_ms": 1e3 * of_case[1],
        "decode_ratio": of_base[0] / of_case[0],
        "prompt_ratio": of_base[1] / of_case[1],
        "tokens_per_s_ratio": all_requests(of_base) / all_requests(of_case),
    }


def _table(found: dict[str, object], sizes: str) -> Table:
    table = Table(title=f"{_ROWS} requests at once, {sizes}")
    for name in ("", "decode step, ms", "prompt, ms", "× decode", "× prompt", "× tokens/s"):
        table.add_column(name, justify="left" if not name else "right")
    rows = found["cases"]
    assert isinstance(rows, list)
    for row in rows:
        table.add_row(
            row["case"],
            f"{row['decode_ms']:.2f}",
            f"{row['prompt_ms']:.1f}",
            f"{row['decode_ratio']:.3f}",
            f"{row['prompt_ratio']:.3f}",
            f"{row['tokens_per_s_ratio']:.3f}",
        )
    return table


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = BenchParser(prog="python -m tests.benchmarks.adapters", description=__doc__)
    parser.add_argument("--adapters", type=at_least_one, default=8, help="adapters in one step (8)")
    parser.add_argument("--rank", type=at_least_one, default=16, help="of each (16)")
    parser.add_argument("--input-tokens", type=at_least_one, default=256, help="of a prompt (256)")
    parser.add_argument("--output-tokens", type=at_least_one, default=128, help="of each (128)")
    parser.add_argument("--rounds", type=at_least_one, default=24, help="turns of all cases (24)")
    parser.add_argument(
        "--cpu-time", action="store_true", help="time of this process, not the clock's"
    )
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("serve_flags", nargs="*", help="flags of tokend serve, after --")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(run(main))
