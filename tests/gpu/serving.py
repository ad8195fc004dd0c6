"""The scheduler and a worker over an 8B model, and transformers on the same weights."""

import time
from typing import Any

import torch

from proto.config import DeviceConfig
from tests.fakes.engine_harness import EngineHarness
from tests.gpu.models import BLOCK, DTYPE, seconds_of_decode
from tests.gpu.phases import demand
from tests.gpu.random_model import CONFIGS, random_decoder
from tests.gpu.timing import CUDA
from worker.ahead import Launched
from worker.attention.flashinfer import load_library
from worker.attention.kv_store import TritonStore
from worker.batch.rows import Rows
from worker.cuda_runner import CudaRunnerMaker, Kernels
from worker.device.accelerator import Cuda
from worker.kv_cache import KVCache, kv_cache_geometry
from worker.kv_layout import kv_layout
from worker.models.registry import spec_from_config
from worker.sample.backend import ReferenceBackend
from worker.sample.device_draw import TritonDraw
from worker.sample.device_edits import TritonEdits
from worker.sample.sampler import Sampler

BATCH = 64
INPUT, OUTPUT = 512, 128
MOST_IDLE = 0.03


class _Ahead:
    """Steps are launched when they are sent; when they were answered is noted."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._launched: dict[int, Launched] = {}
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


def steps_8b() -> dict[str, Any]:
    """64 requests at once through scheduler, rows, graphs and sampling, two steps in flight.

    What a decode step takes beyond the same step queued behind itself, again and again, is
    the time in which the device is idle.
    """
    spec = spec_from_config(CONFIGS["8B"])
    layout = kv_layout(spec.windows)
    geometry = kv_cache_geometry(layout, spec.num_kv_heads, spec.head_dim, DTYPE)
    num_blocks = 1 + BATCH * -(-(INPUT + OUTPUT) // BLOCK)
    decoder = random_decoder(spec, DTYPE, CUDA)
    maker = CudaRunnerMaker(
        DeviceConfig(),
        decoder,
        Cuda(CUDA),
        Kernels(load_library, TritonStore(), TritonDraw(), TritonEdits()),
        Sampler(ReferenceBackend()),
        DTYPE,
    )
    rows = Rows(BATCH, INPUT + OUTPUT, BLOCK, layout.num_groups)
    cache = KVCache(geometry, layout, num_blocks, BLOCK, CUDA)
    captured = time.monotonic()
    runner = maker.runner(cache, rows, lambda fraction: None)
    captured = time.monotonic() - captured
    harness = _Harness(
        num_blocks=num_blocks,
        block_size=BLOCK,
        max_model_len=INPUT + OUTPUT,
        max_num_seqs=BATCH,
        vocab_size=spec.vocab_size,
        async_scheduling=True,
    )
    ahead: Any = _Ahead(runner)
    harness.runner = ahead
    for index in range(BATCH):
        prompt = [(7 * index + 3 * place) % 900 for place in range(INPUT)]
        harness.add_one(prompt, OUTPUT, temperature=0.0, ignore_eos=True, eos_token_ids=())
    started = time.monotonic()
    num_steps = harness.run()
    torch.cuda.synchronize()
    seconds = time.monotonic() - started
    # The last steps may have fewer sequences; those before them have all.
    first, last = ahead.answered[-OUTPUT // 2], ahead.answered[-OUTPUT // 4]
    period = (last - first) / (OUTPUT // 2 - OUTPUT // 4)
    alone = seconds_of_decode(decoder, BATCH, INPUT + OUTPUT * 5 // 8)
    idle = 1 - alone / period
    demand(idle < MOST_IDLE, f"the device is idle {idle:.1%} of a step")
    return {
        "tokens/s": BATCH * OUTPUT / seconds,
        "steps": num_steps,
        "ms a decode step": period * 1e3,
        "ms of the device alone": alone * 1e3,
        "idle": idle,
        "graphs captured in s": captured,
    }


@torch.inference_mode()
def transformers_8b() -> dict[str, Any]:
    """generate() of the same shapes, both batches after a warm-up."""
    from transformers import LlamaConfig, LlamaForCausalLM

    known = {name: each for name, each in CONFIGS["8B"].items() if name != "architectures"}
    with torch.device(CUDA):
        torch.set_default_dtype(DTYPE)
        model = LlamaForCausalLM(LlamaConfig(**known, attn_implementation="sdpa")).eval()
    figures: dict[str, Any] = {}
    for batch in (32, BATCH):
        tokens = torch.randint(0, 900, (batch, INPUT), device=CUDA)

        def generate(count: int, tokens: torch.Tensor = tokens) -> None:
            model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                pad_token_id=0,
            )
            torch.cuda.synchronize()

        generate(4)
        started = time.monotonic()
        generate(OUTPUT)
        figures[f"tokens/s, batch {batch}"] = batch * OUTPUT / (time.monotonic() - started)
    return figures
