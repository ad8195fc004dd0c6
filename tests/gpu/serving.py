"""Scheduler and worker with an 8B model, and transformers on the same weights."""

import time
from typing import Any

import torch

from proto.settings.config import DeviceConfig
from tests.fakes.engine_harness import EngineHarness
from tests.gpu.hardware import hardware, rehearsing
from tests.gpu.models import BLOCK, DTYPE, seconds_of_decode
from tests.gpu.random_model import random_decoder
from tests.gpu.report import Report
from worker.attention.kv_cache import KVCache, kv_cache_geometry, kv_layout
from worker.batch.input_batch import InputBatch
from worker.cuda.runner_builder import Gpu, build_runner
from worker.models.registry import spec_from_config
from worker.reference.sampling import TorchBackend
from worker.sampling.sampler import Sampler
from worker.step.runner_parts import PendingStep, RunnerParts

MOST_IDLE = 0.03


class _LaunchingRunner:
    """A runner that launches steps when they are sent and records when their results arrive."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._launched: dict[int, PendingStep] = {}
        self.answered: list[float] = []

    def launch(self, step: Any) -> None:
        self._launched[step.step] = self._runner.launch(step)

    def execute(self, step: Any) -> Any:
        result = self._launched.pop(step.step).result()
        self.answered.append(time.monotonic())
        return result


class _Harness(EngineHarness):
    def send(self) -> Any:
        step = super().send()
        self.runner.launch(step)  # type: ignore[attr-defined]
        return step


def steps_8b(report: Report) -> None:
    """Many concurrent requests through scheduler, graphs and sampling, with two steps in flight.

    The time of a decode step beyond that of the same step queued repeatedly is the idle time of the
    device.
    """
    gpu = hardware()
    batch, prompt, output = gpu.sizes.batch, gpu.sizes.input, gpu.sizes.output
    spec = spec_from_config(gpu.sizes.configs["8B"])
    decoder = random_decoder(spec, DTYPE, gpu.gpu)
    period = overlapped_steps(report, decoder, batch, prompt, output)
    alone = seconds_of_decode(gpu, decoder, [prompt + output * 5 // 8] * batch)
    idle = 1 - alone / period
    report.figure("ms of the device alone", alone * 1e3)
    report.figure("idle", idle)
    if idle >= MOST_IDLE:
        report.miss(f"the device is idle {idle:.1%} of a step, not under {MOST_IDLE:.0%}")


def overlapped_steps(report: Report, decoder: Any, batch: int, prompt: int, output: int) -> float:
    """Seconds between results of decode steps, with two in flight."""
    gpu, spec = hardware(), decoder.spec
    layout = kv_layout(spec.windows)
    heads = spec.attention_shape
    geometry = kv_cache_geometry(layout, heads.num_kv_heads, heads.head_dim, DTYPE)
    num_blocks = 1 + batch * -(-(prompt + output) // BLOCK)
    rows = InputBatch(batch, prompt + output, BLOCK, layout.num_groups)
    cache = KVCache(geometry, layout, num_blocks, BLOCK, gpu.gpu.zeros)
    captured = time.monotonic()
    runner = build_runner(
        Gpu(gpu.accelerator(), gpu.kernels(), Sampler(TorchBackend())),
        RunnerParts(config=DeviceConfig(), model=decoder, dtype=DTYPE, kv_cache=cache, batch=rows),
    )
    report.figure("graphs captured in s", time.monotonic() - captured)
    harness = _Harness(
        num_blocks=num_blocks,
        block_size=BLOCK,
        max_model_len=prompt + output,
        max_num_seqs=batch,
        vocab_size=spec.vocab_size,
        async_scheduling=True,
    )
    ahead: Any = _LaunchingRunner(runner)
    harness.runner = ahead
    for index in range(batch):
        tokens = [(7 * index + 3 * place) % min(900, spec.vocab_size) for place in range(prompt)]
        harness.add_one(tokens, output, temperature=0.0, ignore_eos=True, eos_token_ids=())
    started = time.monotonic()
    num_steps = harness.run()
    gpu.synchronize()
    seconds = time.monotonic() - started
    # The last steps have fewer sequences and are left out.
    first, last = ahead.answered[-output // 2], ahead.answered[-output // 4]
    period: float = (last - first) / (output // 2 - output // 4)
    report.figure("tokens/s", batch * output / seconds)
    report.figure("steps", num_steps)
    report.figure("ms a decode step", period * 1e3)
    return period


@torch.inference_mode()
def transformers_8b(report: Report) -> None:
    """generate() of transformers with the same shapes, after a warm-up."""
    from transformers import LlamaConfig, LlamaForCausalLM

    gpu = hardware()
    # transformers does not run on the fake.
    device = torch.device("cpu") if rehearsing() else gpu.device
    batch, prompt, output = gpu.sizes.batch, gpu.sizes.input, gpu.sizes.output
    config = gpu.sizes.configs["8B"]
    known = {name: each for name, each in config.items() if name != "architectures"}
    with device:
        torch.set_default_dtype(DTYPE)
        known["attn_implementation"] = "sdpa"
        model = LlamaForCausalLM(LlamaConfig(**known)).eval()
    for size in (batch // 2, batch):
        tokens = torch.randint(0, min(900, config["vocab_size"]), (size, prompt), device=device)

        def generate(count: int, tokens: torch.Tensor = tokens) -> None:
            model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                pad_token_id=0,
            )
            gpu.synchronize()

        generate(4)
        started = time.monotonic()
        generate(output)
        report.figure(f"tokens/s, batch {size}", size * output / (time.monotonic() - started))
