"""vLLM's whole server without a model: its executor answers every step with made-up tokens.

Used by `vllm serve --distributed-executor-backend vllm_null_executor.NullExecutor`, with this
folder on its path; it shares no imports with tokend. API server and EngineCore are vLLM's own
processes. The tokens are those of tokend's null worker.

TOKEND_BENCH_STEP_SECONDS: sleep of every step.
TOKEND_BENCH_NULL_CPU: file for the CPU seconds spent on answers, which are not work of the engine
although they are spent in its process.
"""

import os
import time
from concurrent.futures import Future
from time import thread_time

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes

PRIME = 7919
PLAIN_TOKENS = 1_000


class NullExecutor(Executor):
    """An executor without worker and device, which tracks the tokens of every sequence."""

    def _init_executor(self) -> None:
        self._span = self.model_config.get_vocab_size() - PLAIN_TOKENS
        self._step_seconds = float(os.environ["TOKEND_BENCH_STEP_SECONDS"])
        self._file = os.open(os.environ["TOKEND_BENCH_NULL_CPU"], os.O_WRONLY)
        self._cpu_seconds = 0.0
        self._num_sequences = 0
        self._sequences: dict[str, list[int]] = {}  # index of the sequence, number of tokens

    def execute_model(self, scheduler_output, non_block=False):
        begun = thread_time()
        answer = self._answer(scheduler_output)
        self._cpu_seconds += thread_time() - begun
        os.pwrite(self._file, b"%.9f\n" % self._cpu_seconds, 0)
        if self._step_seconds:
            time.sleep(self._step_seconds)
        if not non_block:
            return answer
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(answer)
        return future

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False):
        """Answer the calls of the engine during its start."""
        made_up = {
            "get_supported_tasks": lambda: ("generate",),
            "get_kv_cache_spec": self._specs,
            "get_supported_kv_cache_layouts": lambda: ["LBNHC"],
            "determine_available_memory": lambda: 64 << 30,
            "compile_or_warm_up_model": lambda: CompilationTimes(0.0, 0.0),
        }
        # by name, or a function that profiles encoders, which do not exist here
        return [made_up.get(method, dict)()]

    def check_health(self) -> None:
        """Always healthy."""

    def _specs(self):
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=3,
            head_size=64,
            dtype=torch.bfloat16,
        )
        return {f"layers.{number}": spec for number in range(30)}

    def _answer(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Return a token for each sequence whose tokens are all computed after this step."""
        sequences, num_scheduled = self._sequences, output.num_scheduled_tokens
        for each in output.finished_req_ids:
            sequences.pop(each, None)
        for new in output.scheduled_new_reqs:
            self._num_sequences += 1
            sequences[new.req_id] = [self._num_sequences, len(new.prompt_token_ids)]
        cached = output.scheduled_cached_reqs
        ids = [new.req_id for new in output.scheduled_new_reqs] + cached.req_ids
        computed = [new.num_computed_tokens for new in output.scheduled_new_reqs]
        sampled: list[list[int]] = []
        for name, begin in zip(ids, computed + cached.num_computed_tokens, strict=True):
            sequence = sequences[name]
            number, num_tokens = sequence
            if begin + num_scheduled[name] < num_tokens:
                sampled.append([])
            else:
                sampled.append([PLAIN_TOKENS + (number * PRIME + num_tokens) % self._span])
                sequence[1] += 1
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={each: index for index, each in enumerate(ids)},
            sampled_token_ids=sampled,
        )
