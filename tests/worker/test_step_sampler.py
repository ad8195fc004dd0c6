"""The step sampler: rows with different parameters, and rows with several sampled positions."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from proto.messages.logit_edits import LogitEdits
from proto.messages.sampling_params import SamplingParams
from proto.messages.scheduler_output import (
    CachedRequestData,
    GrammarOutput,
    NewRequestData,
    SchedulerOutput,
)
from tests.worker.reference.torch_kernels import TorchEdits, draw_by_torch
from tests.worker.sampling.settings import backend_of, each_backend
from tests.worker.sampling.test_device_edits import HostAccelerator
from worker.batch.input_batch import InputBatch, build_inputs
from worker.batch.step_inputs import StepInputs, sample_last_tokens
from worker.cuda.sampling.device_sampler import DeviceSampler, LogprobRequests
from worker.sampling.logprobs import pack_logprobs
from worker.sampling.sampler import Sampler
from worker.step.step_sampler import StepSampler, StepSamplerOutput

VOCAB = 50
PROMPT = [1, 2, 3]


def greedy(**params) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 9, "temperature": 0.0, **params})


class Step:
    """One step of sequences with these parameters, the common prompt and these outputs."""

    def __init__(self, params: list[SamplingParams], outputs: list[list[int]] | None = None):
        outputs = outputs or [[] for _ in params]
        self.batch = InputBatch(len(params) + 2, 20, 16)
        new = [
            NewRequestData(
                seq_id=seq_id,
                prompt_token_ids=PROMPT,
                output_token_ids=output,
                sampling_params=sampling_params,
                seed=5,
                choice=0,
                block_ids=[[1, 2]],
                num_computed_tokens=0,
                num_scheduled_tokens=len(PROMPT) + len(output),
            )
            for seq_id, (sampling_params, output) in enumerate(zip(params, outputs, strict=True))
        ]
        step = SchedulerOutput(
            epoch=1,
            step=1,
            new_requests=new,
            cached_requests=CachedRequestData(),
            total_num_scheduled_tokens=len(PROMPT) * len(params),
            finished_seq_ids=[],
            preempted_seq_ids=[],
        )
        self.seq_ids = list(range(len(params)))
        self.inputs: StepInputs = build_inputs(step, self.batch.apply(step), self.batch)

    def sample(
        self, sampler: Sampler, logits: torch.Tensor, grammars: GrammarOutput | None = None
    ) -> StepSamplerOutput:
        return StepSampler(self.batch, sampler).sample_step(
            self.inputs,
            self.seq_ids,
            logits,
            np.zeros(len(self.seq_ids), dtype=np.bool_),
            lambda: grammars or GrammarOutput(0, 0, [], b""),
        )


PARAMS = {
    "plain": greedy(),
    "penalised": greedy(edits=LogitEdits(repetition_penalty=3.0)),
    "biased": greedy(edits=LogitEdits(bias_token_ids=(7,), bias_values=(50.0,))),
    "allowed": greedy(edits=LogitEdits(allowed_token_ids=(30, 31))),
    "bad word": greedy(edits=LogitEdits(bad_words=((2,),))),
    "early": greedy(min_tokens=2, eos_token_ids=(2,)),
    "early elsewhere": greedy(min_tokens=2, eos_token_ids=(2, 9)),
    "early and biased": greedy(
        min_tokens=2,
        eos_token_ids=(2,),
        edits=LogitEdits(bias_token_ids=(2,), bias_values=(9.0,)),
    ),
    "drawn": SamplingParams(max_tokens=9),
    "logprobs": greedy(logprobs=2, edits=LogitEdits(bad_words=((2,),))),
}
BEST = {"plain": 2, "biased": 7, "allowed": 31, "early elsewhere": 11}
"""Of the logits below; of all other greedy rows it is 9."""


def some_logits() -> torch.Tensor:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) / 10
    logits[2], logits[9], logits[11], logits[31] = 9.0, 8.0, 7.0, 6.0
    return logits


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_its_batch(variant, dtype: torch.dtype) -> None:
    sampler = Sampler(backend_of(variant))
    step = Step(list(PARAMS.values()))
    logits = some_logits().repeat(len(PARAMS), 1).to(dtype)
    together = step.sample(sampler, logits.clone())
    for sequence, (name, params) in enumerate(PARAMS.items()):
        alone = Step([params]).sample(sampler, logits[:1].clone())
        assert together.tokens[sequence] == alone.tokens[0]
        if name != "drawn":
            assert together.tokens[sequence] == [BEST.get(name, 9)]
        assert step.batch.num_tokens[step.inputs.rows[sequence]] == len(PROMPT) + 1
    (logprobs,) = together.logprobs
    raw = logits[0].float().log_softmax(0)
    values = np.frombuffer(logprobs.arrays.logprobs, dtype="<f4")
    assert np.allclose(values, [raw[9], raw[2], raw[9]]), "of the logits before all edits"


@each_backend
def test_stop_tokens_are_allowed_after_min_tokens(variant) -> None:
    sampler = Sampler(backend_of(variant))
    tokens: list[list[list[int]]] = []
    for _ in range(3):
        outputs = [[token for step in tokens for token in step[row]] for row in range(2)]
        step = Step([PARAMS["early"], PARAMS["early elsewhere"]], outputs)
        tokens.append(step.sample(sampler, some_logits().repeat(2, 1)).tokens)
    assert tokens == [[[9], [11]], [[9], [11]], [[2], [2]]]


NUM_SAMPLED = [0, 1, 3]
RAGGED = {
    "greedy": greedy(),
    "drawn": SamplingParams(max_tokens=9, temperature=0.8),
    "filtered": SamplingParams(max_tokens=9, temperature=1.2, top_k=7, top_p=0.9, logprobs=2),
    "penalised": greedy(
        edits=LogitEdits(repetition_penalty=1.7, frequency_penalty=1.5, bad_words=((7, 9), (8, 2)))
    ),
    "penalised and drawn": SamplingParams(
        max_tokens=9, edits=LogitEdits(presence_penalty=5.0, bad_words=((6, 9),)), logprobs=1
    ),
    "early": greedy(min_tokens=2, eos_token_ids=(2, 9), logprobs=0),
}


def ragged_step(params: SamplingParams, draft: list[int]) -> Step:
    """Three sequences with 0, 1 and 3 sampled positions; the third has a draft of two tokens."""
    step = Step([params] * 3, [[4], [5], [6, *draft]])
    step.batch.num_tokens[step.inputs.rows[2]] -= 2
    if params.edits is not None:
        # The edits of a row depend only on its own tokens.
        known = Step([params], [[6]]).batch
        step.batch.edits[int(step.inputs.rows[2])] = known.edits.popitem()[1]
    sample_start, sample_tokens = sample_last_tokens(
        step.inputs.query_start, np.array(NUM_SAMPLED, dtype=np.int32)
    )
    assert sample_start.tolist() == [0, 0, 1, 4]
    assert sample_tokens.tolist() == [7, 11, 12, 13]
    step.inputs = replace(step.inputs, sample_start=sample_start, sample_tokens=sample_tokens)
    return step


def alone(params: SamplingParams, output: list[int]) -> Step:
    return Step([params], [output])


def ragged_logits() -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return some_logits() + torch.randn(4, VOCAB, generator=generator)


def drafted(
    params: SamplingParams, sampler: Sampler, logits: torch.Tensor, num_right: int
) -> tuple[list[int], list[StepSamplerOutput]]:
    """Return a draft whose first tokens are right, and what each sampled position gives alone.

    Of the third sequence only the positions that count: up to the first wrong token.
    """
    expected = [alone(params, [5]).sample(sampler, logits[:1].clone())]
    outputs = [6]
    for index in range(1, 4):
        if index <= num_right + 1:
            given = alone(params, outputs).sample(sampler, logits[index : index + 1].clone())
            expected.append(given)
        (token,) = given.tokens[0]
        outputs.append(token if index <= num_right else (token + 1) % VOCAB)
    return outputs[1:3], expected


@each_backend
@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("num_right", [0, 1, 2])
def test_a_sampled_position_does_not_depend_on_its_batch(
    variant, name: str, num_right: int
) -> None:
    params, sampler, logits = RAGGED[name], Sampler(backend_of(variant)), ragged_logits()
    draft, expected = drafted(params, sampler, logits, num_right)
    step = ragged_step(params, draft)
    found = step.sample(sampler, logits.clone())
    first, *others = [token for each in expected for token in each.tokens[0]]
    assert len(others) == num_right + 1
    assert found.tokens == [[], [first], others]
    row, end = step.inputs.rows[2], 5 + num_right
    assert step.batch.token_ids[row, 4:end].tolist() == others, "behind the last known token"
    assert step.batch.num_tokens[row] == end
    if params.logprobs is not None:
        assert [logprobs.seq_id for logprobs in found.logprobs] == [1, 2]
        arrays, alone_arrays = (
            found.logprobs[1].arrays,
            [each.logprobs[0].arrays for each in expected[1:]],
        )
        assert arrays.first_position == 1
        assert arrays.token_ids == b"".join(each.token_ids for each in alone_arrays)
        assert arrays.logprobs == b"".join(each.logprobs for each in alone_arrays)


@pytest.mark.parametrize("name", RAGGED)
def test_sampled_positions_on_a_device_equal_those_of_the_host(name: str) -> None:
    params, sampler, logits = RAGGED[name], Sampler(backend_of("reference")), ragged_logits()
    draft, _ = drafted(params, sampler, logits, 2)
    host, step = ragged_step(params, draft), ragged_step(params, draft)
    expected = host.sample(sampler, logits.clone())
    accelerator = HostAccelerator()
    last = accelerator.zeros(len(step.batch.num_tokens), torch.int64)
    device_sampler = DeviceSampler(
        accelerator,  # type: ignore[arg-type]
        step.batch,
        last,
        VOCAB,
        draw_by_torch,
        TorchEdits(),
    )
    positions = step.batch.sampled_positions(step.inputs, step.seq_ids)
    requests = LogprobRequests.of(step.batch, positions)
    token_ids, logprobs = device_sampler.sample(
        logits, positions, GrammarOutput(0, 0, [], b""), requests
    )
    assert token_ids.tolist() == [*expected.tokens[1], *expected.tokens[2]]
    assert positions.last_of_rows().tolist() == [0, 3]  # type: ignore[union-attr]
    step.batch.append_sampled(positions.rows, token_ids.numpy())
    assert step.batch.token_ids.tolist() == host.batch.token_ids.tolist()
    if requests:
        packed = pack_logprobs(
            [tensor.numpy().reshape(-1) for tensor in logprobs],
            requests.num_logprobs,
            requests.position,
            requests.named,
        )
        assert [arrays.first_position for arrays in packed] == [1, 1, 2, 3]
    # The token counts of the third sequence include all tokens of this step.
    if params.edits is not None and params.edits.penalises:
        slot = device_sampler._counts._slots[int(step.inputs.rows[2]), 0]
        counts = device_sampler._counts.counts[slot.index]
        assert slot.num_outputs == 1 + 3
        for token, count in zip(
            *np.unique([6, *expected.tokens[2]], return_counts=True), strict=True
        ):
            assert int(counts[token]) % (1 << 30) == count


@each_backend
def test_every_sampled_position_has_its_own_grammar_mask(variant) -> None:
    allowed = [[3], [4], [5], [6]]
    words = np.zeros((4, -(-VOCAB // 32)), dtype="<u4")
    for index, (token,) in enumerate(allowed):
        words[index, token // 32] = 1 << token % 32
    grammars = GrammarOutput(1, 1, [1, 2, 2, 2], words.tobytes())
    step = ragged_step(greedy(), [4, 5])
    found = step.sample(Sampler(backend_of(variant)), ragged_logits(), grammars)
    assert found.tokens == [[], [3], [4, 5, 6]]


@each_backend
@pytest.mark.parametrize("name", ["greedy", "drawn"])
@pytest.mark.parametrize("index", [1, 2, 3])
def test_nonfinite_logits_end_a_draft(variant, name: str, index: int) -> None:
    """The sequence fails only if they are those of its first position."""
    params, sampler, logits = RAGGED[name], Sampler(backend_of(variant)), ragged_logits()
    draft, expected = drafted(params, sampler, logits, 2)
    logits[index] = float("nan")
    step = ragged_step(params, draft)
    nonfinite = np.zeros(3, dtype=np.bool_)
    found = StepSampler(step.batch, sampler).sample_step(
        step.inputs, step.seq_ids, logits, nonfinite, lambda: GrammarOutput(0, 0, [], b"")
    )
    assert found.tokens[2] == [each.tokens[0][0] for each in expected[1:index]]
    assert nonfinite.tolist() == [False, False, index == 1]
