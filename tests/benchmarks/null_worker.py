"""A null worker as a process of a daemon.

It behaves like a worker on its links, without weights, tensors and torch, so a daemon with it has
the costs of everything except the model.

supervisor ── boot ──▶ WorkerReady ──▶ engine ── InitializeCache ──▶ CacheReady
engine ── SchedulerOutput ──▶ FakeWorker ── ModelRunnerOutput ──▶ engine
"""

import argparse
import time

from engine_core.scheduler.result import ends_of_rows
from proto import PROTOCOL_VERSION
from proto.messages.lifecycle import (
    CacheReady,
    InitializeCache,
    KVCacheGeometry,
    NewEngine,
    ProcessBoot,
    Shutdown,
    WorkerReady,
)
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.scheduler_output import SchedulerOutput
from proto.runtime.process import run
from proto.runtime.sockets import Link, Poller, worker_path

# A worker that computes nothing and answers every step with made-up tokens.


NUM_TOKEN_IDS = 49_152
"""Size of the vocabulary."""
GEOMETRY = KVCacheGeometry(
    num_slots=30, num_kv_heads=3, head_dim=64, dtype="bfloat16", bytes_per_token=23_040
)
"""That of SmolLM2. No figure depends on it."""
_PRIME = 7919


class FakeWorker:
    """Tracks the number of tokens of every sequence, which determines the sequences that sample.

    vocab_size, lowest: exclusive upper and inclusive lower bound of its tokens.
    """

    def __init__(self, vocab_size: int = NUM_TOKEN_IDS, lowest: int = 0) -> None:
        self._lowest = lowest
        self._span = vocab_size - lowest
        self._num_tokens: dict[int, int] = {}

    def answer(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Return a token for each sequence whose tokens are all computed after this step."""
        num_tokens = self._num_tokens
        for seq_id in output.finished_seq_ids:
            num_tokens.pop(seq_id, None)
        for new in output.new_requests:
            num_tokens[new.seq_id] = len(new.prompt_token_ids) + len(new.output_token_ids)
        seq_ids = [each.seq_id for each in output.new_requests] + output.cached_requests.seq_ids
        sampled: list[list[int]] = []
        for seq_id, end in zip(seq_ids, ends_of_rows(output), strict=True):
            if end < num_tokens[seq_id]:
                sampled.append([])
            else:
                mixed = seq_id * _PRIME + num_tokens[seq_id]
                sampled.append([self._lowest + mixed % self._span])
                num_tokens[seq_id] += 1
        return ModelRunnerOutput(output.epoch, output.step, seq_ids, sampled)


PLAIN_TOKENS = 1_000
"""First token with a text that rarely needs the next token; in a vocabulary of at least twice
this size special tokens and single bytes have lower ids."""
KV_CACHE_BYTES = 1 << 30
"""Reported memory; nothing is allocated."""


class NullWorker:
    """Serves one engine after another. step_seconds: sleep of every step."""

    def __init__(self, boot: ProcessBoot, supervisor: Link, step_seconds: float) -> None:
        self._boot = boot
        self._step_seconds = step_seconds
        self._supervisor = supervisor
        self._connect(boot.worker_epoch)

    def run(self) -> None:
        """Serve until Shutdown."""
        while True:
            self._poller.wait()
            for order in self._supervisor.receive():
                if isinstance(order, Shutdown):
                    return
                if isinstance(order, NewEngine):
                    self._engine.close()
                    self._connect(order.worker_epoch)
            for message in self._engine.receive():
                self._serve(message)

    def _connect(self, epoch: int) -> None:
        """Connect to the engine of an epoch, without any sequences."""
        path = worker_path(self._boot.run_dir, epoch, self._boot.index)
        self._engine = Link.connect(path, InitializeCache | SchedulerOutput)
        self._poller = Poller([self._supervisor, self._engine])
        vocab_size = self._boot.model.vocab_size
        lowest = PLAIN_TOKENS if vocab_size >= 2 * PLAIN_TOKENS else 0
        self._worker = FakeWorker(vocab_size, lowest)
        self._engine.send(
            WorkerReady(
                PROTOCOL_VERSION,
                epoch,
                self._boot.index,
                GEOMETRY,
                KV_CACHE_BYTES,
                self._boot.model.vocab_size,
                bytes(32),
                "nothing",
            )
        )

    def _serve(self, message: InitializeCache | SchedulerOutput) -> None:
        if isinstance(message, InitializeCache):
            self._engine.send(CacheReady(message.epoch, self._boot.index))
        else:
            answer = self._worker.answer(message)
            if self._step_seconds:
                time.sleep(self._step_seconds)
            self._engine.send(answer)


def main(boot: ProcessBoot, supervisor: Link) -> None:
    """Run the worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-ms", type=float, default=0.0)
    own, _ = parser.parse_known_args()
    NullWorker(boot, supervisor, own.step_ms / 1e3).run()


if __name__ == "__main__":
    run(lambda boot, supervisor: main)
