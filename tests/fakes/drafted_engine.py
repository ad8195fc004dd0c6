"""A scheduler and a runner on the kernels, and their answers without drafts."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from engine_core.request import Request
from proto.messages.engine_io import EngineCoreOutput
from proto.messages.logit_edits import LogitEdits
from proto.messages.sampling_params import RepetitionDetection
from tests.fakes.devices import CPU, create_backend, create_sampler
from tests.fakes.drafts import SyntheticDrafts
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.events import num_cached_tokens
from worker.attention.kv_cache import KVCache
from worker.attention.state_cache import AttentionWithStates, StateCache
from worker.batch.input_batch import InputBatch
from worker.models.decoder import Decoder
from worker.plan.memory_plan import layer_cache
from worker.step.model_runner import ModelRunner
from worker.step.routed_experts import RoutedExpertsCache, record_experts

BLOCK = 4

NUM_BLOCKS = 300

NUM_ROWS = 12

NUM_STATE_SLOTS = 1 + 3 * NUM_ROWS

MAX_LOGGED = 16

STEP_TOKENS = 48

VOCAB_SIZE = 96

EOS = 7

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": tuple(range(40)), "logprobs": 0},
    {"temperature": 0.0, "edits": LogitEdits(frequency_penalty=1.5, presence_penalty=0.5)},
    {"temperature": 0.9, "edits": LogitEdits(repetition_penalty=1.7), "logprobs": 1},
    {
        "temperature": 0.0,
        "edits": LogitEdits(
            allowed_token_ids=(3, 4, 5), bad_words=((4, 4), (5,), (3, 3, 3), (3, 4, 3))
        ),
    },
    {
        "temperature": 0.7,
        "edits": LogitEdits(bias_token_ids=(1, 2, 3), bias_values=(5.0, -9.0, 4.5)),
        "logprobs": 1,
        "logprob_token_ids": (8, 2),
    },
    {"temperature": 0.0, "prompt_logprobs": 1, "return_routed_experts": True},
    {
        "temperature": 0.0,
        "edits": LogitEdits(allowed_token_ids=(3, 4), bad_words=((3, 3), (4, 4))),
        "repetition": RepetitionDetection(min_count=3, min_pattern_size=1, max_pattern_size=4),
    },
    {"temperature": 1.3, "n": 2},
]


class Setup:
    """A model on the kernels, and its answers without drafts."""

    def __init__(self, decoder: Decoder, kv_dtype: torch.dtype, *, returns_experts: bool) -> None:
        self.decoder = decoder
        self.returns_experts = returns_experts
        self._kv_dtype = kv_dtype
        self.answers: dict[tuple[int, int], list[int]] = {}
        self.expected: list[dict[str, Any]] = []

    def record_answers(self) -> None:
        plain = self.harness()
        requests = serve(plain)
        self.expected = answers_of(plain, requests)
        for each in requests:
            self.answers[each.request_id, each.choice] = plain.tokens_of(each)

    def runner(self, backend: str = "cpu") -> ModelRunner:
        spec = self.decoder.spec
        layout, geometry = layer_cache(spec, self._kv_dtype, MAX_LOGGED)
        cache = KVCache(geometry, layout, NUM_BLOCKS, BLOCK)
        states = layout.states
        rows = InputBatch(
            NUM_ROWS,
            spec.max_position,
            BLOCK,
            layout.num_groups,
            has_states=states is not None,
        )
        attention = create_backend(backend, cache, spec.attention_shape)
        if states is not None:
            slots = StateCache(states, NUM_STATE_SLOTS, BLOCK)
            slots.buffer[:, : sum(states.layer_sizes)] = float("nan")
            attention = AttentionWithStates(attention, slots)
        experts = None
        if self.returns_experts:
            record = record_experts(self.decoder, STEP_TOKENS, torch.device("cpu"))
            experts = RoutedExpertsCache(spec, cache, record)
        return ModelRunner(
            self.decoder, attention, create_sampler(), rows, cache, CPU.transfers(), experts=experts
        )

    def harness(
        self, *, is_full: bool = False, drafting: SyntheticDrafts | None = None, **settings: Any
    ) -> EngineHarness:
        """is_full: the pool has room for two requests of average length."""
        layout, geometry = layer_cache(self.decoder.spec, self._kv_dtype, MAX_LOGGED)
        windows = layout.windows
        engine = EngineHarness(
            groups=geometry.groups,
            num_state_slots=NUM_STATE_SLOTS if layout.states else 0,
            num_blocks=30 * len(windows) if is_full else NUM_BLOCKS,
            block_size=BLOCK,
            max_model_len=self.decoder.spec.max_position,
            max_num_batched_tokens=STEP_TOKENS,
            max_num_seqs=NUM_ROWS,
            windows=windows,
            vocab_size=self.decoder.spec.vocab_size,
            drafting=drafting,
            **settings,
        )
        engine.runner = self.runner()  # type: ignore[assignment]
        return engine

    def drafts(self, acceptance: float, seed: int = 0) -> SyntheticDrafts:
        def answer(request: Request, num_tokens: int) -> list[int]:
            recorded = self.answers[request.request_id, request.choice]
            first = request.num_output_tokens
            return recorded[first : first + num_tokens] or [5]

        return SyntheticDrafts(acceptance, answer, seed=seed, vocab_size=VOCAB_SIZE)


def all_requests() -> Iterator[tuple[dict[str, Any], list[int], int, int]]:
    """Yield the parameters of each request, its prompt, its number and its choices."""
    generator = torch.Generator().manual_seed(3)
    for index, params in enumerate(PARAMS):
        count = 3 + 5 * index % 17
        prompt = torch.randint(0, VOCAB_SIZE, (count,), generator=generator).tolist()
        others = {name: value for name, value in params.items() if name != "n"}
        yield others, prompt, index, params.get("n", 1)


def serve(
    engine: EngineHarness, *, loses_workers_at: int = 0, new_runner: Callable[[], Any] | None = None
) -> list[Request]:
    """Serve requests that arrive while others run. loses_workers_at: a step; 0 for none."""
    requests = []
    for params, prompt, index, n in all_requests():
        requests += engine.add(prompt, 30 + index, n=n, seed=index, eos_token_ids=(EOS,), **params)
        engine.step()
        if loses_workers_at == index + 1:
            engine.lose_workers(runner=new_runner())  # type: ignore[misc]
    engine.run()
    return requests


def joined(outputs: list[EngineCoreOutput]) -> dict[str, Any]:
    """The outputs of a choice as if they were one, without times."""
    logprobs = [each.logprobs for each in outputs if each.logprobs is not None]
    found: dict[str, Any] = {
        "tokens": [token for each in outputs for token in each.new_token_ids],
        "ends": [(each.finish_reason, each.stop_reason) for each in outputs if each.finish_reason],
        "last": [each.finish_reason is not None for each in outputs].index(True)
        == len(outputs) - 1,
        "cached": [num_cached_tokens(each) for each in outputs if each.events],
        "logprobs": b"".join(each.logprobs for each in logprobs),
        "logprob ids": b"".join(each.token_ids for each in logprobs),
        "ranks": b"".join(each.ranks for each in logprobs),
    }
    index = 0
    for each in outputs:
        assert not each.new_token_ids or each.token_index == index
        index += len(each.new_token_ids)
        if each.logprobs is not None:
            assert len(each.logprobs.ranks) == 4 * len(each.new_token_ids)
            assert each.logprobs.first_position == each.token_index
    experts: dict[int, bytes] = {}
    for each in outputs:
        routed = each.routed_experts
        if routed is not None:
            size = routed.num_layers * routed.top_k * routed.num_bytes
            for offset in range(0, len(routed.data), size):
                position = routed.first_position + offset // size
                experts[position] = routed.data[offset : offset + size]
    found["experts"] = experts
    prompt: dict[int, bytes] = {}
    for each in outputs:
        if each.prompt_logprobs is not None:  # again after a preemption
            arrays = each.prompt_logprobs
            size = 4 * arrays.width
            for offset in range(0, len(arrays.logprobs), size):
                position = arrays.first_position + offset // size
                prompt[position] = arrays.logprobs[offset : offset + size]
    found["prompt"] = prompt
    return found


def answers_of(engine: EngineHarness, requests: list[Request]) -> list[dict[str, Any]]:
    return [joined(engine.outputs[each.request_id, each.choice]) for each in requests]
