"""Measure steps that load and save KV in a shared folder: whole blocks, or layer by layer.

A step loads the KV of the beginning of a prompt, computes the rest of it, and stores its blocks.

    whole       load all layers ─▶ compute ─▶ save all layers
    by layer    load ─ load ─ load …
                    compute ─ compute ─ compute …
                            save ─ save ─ save …
    apart       by layer, but each part of a layer is a call: no kernel for all layers

The ratios are to a step that computes as much and copies nothing. Each round has every way once.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Final

from deploy.bench.options import BenchParser, at_least_one
from deploy.display import open_display
from deploy.environment import HostEnvironment
from deploy.models.store import prepared_model
from proto.messages.kv_connector import SharedStorageStep, pack
from proto.messages.sampling_params import SamplingParams
from proto.messages.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from proto.runtime.sockets import Poller
from proto.settings.config import CacheConfig, ModelConfig, ServeConfig
from proto.settings.kv_transfer_config import KVTransferConfig
from tests.benchmarks.command import from_zero_number, run
from tests.benchmarks.steps_program import BenchWorker
from worker.kv_connector.base import NO_CONNECTOR, WorkerConnector, WorkerContext
from worker.kv_connector.shared_storage import SharedStorageWorker
from worker.kv_connector.steps import ConnectorSteps, StepConnector
from worker.models.layer_stack import LayerStack
from worker.step.model_runner import ModelRunner

_BLOCK: Final = 16
_FINGERPRINT: Final = bytes(32)


class LimitedFolder(SharedStorageWorker):
    """A SharedStorageWorker whose folder delivers a number of bytes a second; 0: no limit."""

    bytes_per_second = 0.0

    def wait_for_layer_load(self, layer: int) -> None:
        if self.bytes_per_second:
            num_bytes = len(self._step.load_hashes) * self._part_bytes
            time.sleep(num_bytes / self.bytes_per_second)
        super().wait_for_layer_load(layer)


class WholeBlocks(LimitedFolder):
    """Loads all layers before a step, and saves them after it."""

    per_layer = False

    def start_load_kv(self) -> None:
        super().start_load_kv()
        for layer in range(len(self._slots)):
            self.wait_for_layer_load(layer)

    def wait_for_save(self) -> None:
        for layer in range(len(self._slots)):
            self.save_kv_layer(layer)
        super().wait_for_save()


class Measured:
    """Steps of one worker with one way to copy."""

    def __init__(
        self, worker: BenchWorker, folder: str, kind: type[LimitedFolder] | None, length: int
    ) -> None:
        self._runner: ModelRunner = worker.runner(2 + length // _BLOCK, length + 1)
        cache = self._runner.kv_cache
        connector: WorkerConnector = NO_CONNECTOR
        if kind is not None:
            config = KVTransferConfig(
                kv_connector="SharedStorageConnector",
                kv_connector_extra_config={"shared_storage_path": folder},
            )
            context = WorkerContext(0, 1, _FINGERPRINT, _BLOCK, worker.loaded.device)
            connector = kind(config, context)
            connector.register_kv_caches(cache)
        num_layers = len(cache.layout.layer_slots)
        progress = worker.loaded.device.layer_progress(num_layers) if connector.per_layer else None
        self._model, self._progress = worker.loaded.model, progress
        step_connector = StepConnector(connector, progress, num_layers)
        self._steps = ConnectorSteps(step_connector, 1, 0, Poller(), lambda report: None)
        self._blocks = list(range(1, 1 + length // _BLOCK))
        self._step = 0

    def seconds(self, num_loaded: int, num_computed: int) -> float:
        """Run a step that loads this many blocks, computes others and stores these."""
        self._step += 1
        hashes = [block.to_bytes(32, "big") for block in self._blocks]
        last = num_loaded + num_computed
        copies = SharedStorageStep(
            hashes[:num_loaded],
            self._blocks[:num_loaded],
            [f"{self._step:032}".encode()[:24] + each[-8:] for each in hashes[num_loaded:last]],
            self._blocks[num_loaded:last],
        )
        if not num_loaded:
            copies = SharedStorageStep([], [], hashes[:last], self._blocks[:last])
        request = NewRequestData(
            seq_id=self._step,
            prompt_token_ids=[1000 + each for each in range(last * _BLOCK)],
            output_token_ids=[],
            sampling_params=SamplingParams(max_tokens=9, temperature=0.0),
            seed=0,
            choice=0,
            block_ids=[self._blocks],
            num_computed_tokens=num_loaded * _BLOCK,
            num_scheduled_tokens=num_computed * _BLOCK,
        )
        step = SchedulerOutput(
            epoch=1,
            step=self._step,
            new_requests=[request],
            cached_requests=CachedRequestData(),
            total_num_scheduled_tokens=num_computed * _BLOCK,
            finished_seq_ids=[self._step - 1] if self._step > 1 else [],
            preempted_seq_ids=[],
            connector_metadata=pack(copies),
        )
        self._model.track_layers(self._progress)
        started = time.perf_counter()
        self._steps.before_step(step)
        self._runner.execute(step)
        self._steps.after_launch()
        self._steps.after_step(step)
        return time.perf_counter() - started


def main(words: Sequence[str]) -> None:
    parser = BenchParser(prog="python -m tests.benchmarks.layer_copies", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=at_least_one, default=9)
    parser.add_argument("--loaded-tokens", type=at_least_one, default=1536)
    parser.add_argument("--computed-tokens", type=at_least_one, default=256)
    parser.add_argument(
        "--folder-gbps",
        type=from_zero_number,
        default=0.0,
        help="limit of reads; 0: none",
    )
    options = parser.parse_args(words)
    LimitedFolder.bytes_per_second = options.folder_gbps * 1e9
    num_loaded, num_computed = options.loaded_tokens // _BLOCK, options.computed_tokens // _BLOCK
    config = ServeConfig(
        model=ModelConfig(model=options.model), cache=CacheConfig(block_size=_BLOCK)
    )
    with closing(open_display(sys.stderr)) as display:
        model = prepared_model(options.model, HostEnvironment.of(os.environ), display)
    worker = BenchWorker(config, model)
    stacks = worker.loaded.model._stacks
    length = (num_loaded + num_computed) * _BLOCK
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, Callable[[], float]] = {}
        for name, kind, chosen in (
            ("no copies", None, stacks),
            ("whole", WholeBlocks, stacks),
            ("by layer", LimitedFolder, stacks),
            ("apart", LimitedFolder, stacks[-1:]),
        ):
            measured = Measured(worker, folder, kind, length)
            if kind is WholeBlocks:
                measured.seconds(0, num_loaded)  # makes the files

            def way(measured: Measured = measured, chosen: Sequence[LayerStack] = chosen) -> float:
                worker.loaded.model._stacks = chosen
                return measured.seconds(num_loaded, num_computed)

            ways[name] = way
        rounds = [{name: way() for name, way in ways.items()} for _ in range(options.rounds + 1)]
    for name in ways:
        times = [each[name] for each in rounds[1:]]
        ratios = [each[name] / each["no copies"] for each in rounds[1:]]
        print(
            f"{name:10} {statistics.median(times) * 1e3:8.1f} ms   "
            f"{statistics.median(ratios):6.3f} of no copies"
        )


if __name__ == "__main__":
    sys.exit(run(main))
