"""Runs workloads on vLLM's scheduler; prints their timings, one JSON line each.

Run by the interpreter of an environment that has vLLM; it shares no imports with tokend.
tests/benchmarks/messages.py describes the lines. The scheduler is driven like in vLLM's engine,
with statistics and a frozen start-up heap, on a made-up model: only its context length and its
cache layout matter.
"""

import gc
import itertools
import json
import os
import pickle
import random
import statistics
import sys
import tempfile
from pathlib import Path
from time import thread_time_ns

os.environ.update(
    VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1"
)

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

NUM_TOKEN_IDS = 49_152
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": NUM_TOKEN_IDS,
    "torch_dtype": "bfloat16",
}


def build(workload: dict) -> tuple:
    """Return (scheduler, block hasher) with vLLM's defaults and the workload's settings."""
    with tempfile.TemporaryDirectory() as folder:
        config = {**MODEL, "max_position_embeddings": workload["max_model_len"]}
        Path(folder, "config.json").write_text(json.dumps(config))
        model_config = ModelConfig(
            model=folder,
            tokenizer=folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            seed=0,
            max_model_len=workload["max_model_len"],
        )
    scheduler_config = SchedulerConfig(
        max_num_seqs=workload["max_num_seqs"],
        max_num_batched_tokens=workload["max_num_batched_tokens"],
        max_model_len=workload["max_model_len"],
        is_encoder_decoder=False,
        policy=workload["scheduling_policy"],
        enable_chunked_prefill=True,
        async_scheduling=False,
    )
    cache_config = CacheConfig(block_size=workload["block_size"], enable_prefix_caching=True)
    config = VllmConfig(
        model_config=model_config,
        scheduler_config=scheduler_config,
        cache_config=cache_config,
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
    )
    cache_config.num_gpu_blocks = workload["num_blocks"]
    spec = FullAttentionSpec(
        block_size=workload["block_size"], num_kv_heads=3, head_size=64, dtype=torch.bfloat16
    )
    kv_cache_config = KVCacheConfig(
        num_blocks=workload["num_blocks"],
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=workload["block_size"],
        log_stats=True,
    )
    hash_function = get_hash_fn_by_name(cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    return scheduler, get_request_block_hasher(workload["block_size"], hash_function)


def prompt_of(recipe: dict) -> list[int]:
    tokens: list[int] = []
    for seed, number in recipe["segments"]:
        tokens += random.Random(seed).choices(range(1000, 30_000), k=number)
    return tokens


def requests_of(workload: dict, hasher):
    """Yield the requests of a workload endlessly."""
    recipes = [(recipe, prompt_of(recipe)) for recipe in workload["requests"]]
    for number, (recipe, prompt) in enumerate(itertools.cycle(recipes)):
        message = EngineCoreRequest(
            request_id=str(number),
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=recipe["max_tokens"], ignore_eos=True),
            pooling_params=None,
            arrival_time=float(number),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            priority=recipe["priority"],
        )
        yield Request.from_engine_core_request(message, hasher)


class FakeWorker:
    """A worker that samples a token for each sequence whose tokens are all computed."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._requests = scheduler.requests

    def answer(self, output) -> ModelRunnerOutput:
        ids = list(output.num_scheduled_tokens)
        sampled = []
        for request_id in ids:
            request = self._requests[request_id]
            # schedule() has counted the tokens of this step as computed
            done = request.num_computed_tokens >= request.num_tokens
            token = (int(request_id) * 7919 + request.num_tokens) % NUM_TOKEN_IDS
            sampled.append([token] if done else [])
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={each: index for index, each in enumerate(ids)},
            sampled_token_ids=sampled,
        )


def time_hashing(workload: dict) -> dict:
    _, hasher = build(workload)
    request = next(requests_of(workload, hasher))
    samples = []
    for _ in range(workload["warm_up_steps"] + workload["measured_steps"]):
        request.block_hashes = []
        started = thread_time_ns()
        hasher(request)
        samples.append((thread_time_ns() - started) / 1e3)
    counted = samples[workload["warm_up_steps"] :]
    return {"workload": workload["name"], "num_steps": len(counted), "hash": timing(counted)}


def time_steps(workload: dict) -> dict:
    scheduler, hasher = build(workload)
    gc.collect()
    gc.freeze()
    requests = requests_of(workload, hasher)
    worker = FakeWorker(scheduler)
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
    samples: dict[str, list[float]] = {}
    for number in range(workload["warm_up_steps"] + workload["measured_steps"]):
        while len(scheduler.requests) < workload["concurrency"]:
            scheduler.add_request(next(requests))
        figures = time_step(scheduler, worker, encoder, decoder)
        preempting = workload["measure"] == "preempting steps"
        if number >= workload["warm_up_steps"] and (figures["num_preempted"] or not preempting):
            for name, value in figures.items():
                samples.setdefault(name, []).append(value)
    counted = len(samples.get("schedule", []))
    gc.unfreeze()
    means = {
        name: statistics.mean(samples.pop(name, [0.0]))
        for name in ("num_scheduled", "num_preempted")
    }
    timings = {name: timing(values) for name, values in samples.items()}
    return {"workload": workload["name"], "num_steps": counted, **means, **timings}


def time_step(scheduler, worker, encoder, decoder) -> dict[str, float]:
    """Time one step of vLLM's engine with its multi-process executor.

    It pickles scheduler output and worker output, and encodes the outputs as msgpack.
    """
    start = thread_time_ns()
    output = scheduler.schedule()
    scheduled = thread_time_ns()

    answer = worker.answer(output)
    encode_start = thread_time_ns()
    step_frame = pickle.dumps(output, protocol=pickle.HIGHEST_PROTOCOL)
    result_frame = pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)
    encoded = thread_time_ns()
    pickle.loads(step_frame)
    result = pickle.loads(result_frame)
    decoded = thread_time_ns()

    update_start = thread_time_ns()
    outputs = scheduler.update_from_output(output, result)
    updated = thread_time_ns()

    outputs_start = thread_time_ns()
    frames = [encoder.encode(each) for each in outputs.values()]
    outputs_encoded = thread_time_ns()
    for each in frames:
        decoder.decode(each)
    outputs_decoded = thread_time_ns()
    outputs_bytes = sum(len(buffer) for frame in frames for buffer in frame)
    return {
        "schedule": (scheduled - start) / 1e3,
        "update": (updated - update_start) / 1e3,
        "encode": (encoded - encode_start + outputs_encoded - outputs_start) / 1e3,
        "decode": (decoded - encoded + outputs_decoded - outputs_encoded) / 1e3,
        "wire_bytes": len(step_frame) + len(result_frame) + outputs_bytes,
        "num_scheduled": len(answer.req_ids),
        "num_preempted": len(output.preempted_req_ids or ()),
    }


def timing(samples: list[float]) -> dict[str, float]:
    ordered = sorted(samples)
    return {"median": statistics.median(ordered), "p99": ordered[int(len(ordered) * 0.99)]}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's own output must not mix with the answers
    for line in sys.stdin:
        workload = json.loads(line)
        play = time_hashing if workload["measure"] == "hashing" else time_steps
        answers.write(json.dumps(play(workload)) + "\n")
        answers.flush()
        gc.collect()


if __name__ == "__main__":
    main()
