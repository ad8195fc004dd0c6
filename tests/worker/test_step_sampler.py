"""Tokens of a step by what its rows want, side by side."""

import numpy as np
import pytest
import torch

from proto.logit_edits import LogitEdits
from proto.sampling_params import SamplingParams
from proto.scheduler_output import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput
from tests.worker.sampling.settings import backend_of, each_backend
from worker.input_batch import InputBatch, StepInputs, build_inputs
from worker.sampling.sampler import Chosen, Sampler, StepSampler

VOCAB = 50
PROMPT = [1, 2, 3]


def greedy(**wishes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 9, "temperature": 0.0, **wishes})


class Step:
    """One step of sequences with these wishes, each with the prompt and no output."""

    def __init__(self, wishes: list[SamplingParams]) -> None:
        self.rows = InputBatch(len(wishes), 20, 16)
        new = [
            NewRequestData(
                seq_id=row,
                prompt_token_ids=PROMPT,
                output_token_ids=[],
                sampling_params=params,
                seed=5,
                choice=0,
                block_ids=[[1, 2]],
                num_computed_tokens=0,
                num_scheduled_tokens=len(PROMPT),
            )
            for row, params in enumerate(wishes)
        ]
        step = SchedulerOutput(
            epoch=1,
            step=1,
            new_requests=new,
            cached_requests=CachedRequestData(),
            total_num_scheduled_tokens=len(PROMPT) * len(wishes),
            finished_seq_ids=[],
            preempted_seq_ids=[],
        )
        self.inputs: StepInputs = build_inputs(step, self.rows.apply(step), self.rows)

    def choose(self, sampler: Sampler, scores: torch.Tensor) -> Chosen:
        count = len(self.rows.num_tokens)
        return StepSampler(self.rows, sampler).choose(
            self.inputs,
            list(range(count)),
            scores,
            np.zeros(count, dtype=np.bool_),
            lambda: GrammarOutput(0, 0, [], b""),
        )


WISHES = {
    "plain": greedy(),
    "penalised": greedy(edits=LogitEdits(repetition_penalty=3.0)),
    "biased": greedy(edits=LogitEdits(bias_token_ids=(7,), bias_values=(50.0,))),
    "allowed": greedy(edits=LogitEdits(allowed_token_ids=(30, 31))),
    "bad word": greedy(edits=LogitEdits(bad_words=((2,),))),
    "late": greedy(min_tokens=2, eos_token_ids=(2,)),
    "late elsewhere": greedy(min_tokens=2, eos_token_ids=(2, 9)),
    "late and biased": greedy(
        min_tokens=2,
        eos_token_ids=(2,),
        edits=LogitEdits(bias_token_ids=(2,), bias_values=(9.0,)),
    ),
    "drawn": SamplingParams(max_tokens=9),
    "logprobs": greedy(logprobs=2, edits=LogitEdits(bad_words=((2,),))),
}
BEST = {"plain": 2, "biased": 7, "allowed": 31, "late elsewhere": 11}
"""Of the scores below; of all other greedy rows it is 9."""


def some_scores() -> torch.Tensor:
    scores = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) / 10
    scores[2], scores[9], scores[11], scores[31] = 9.0, 8.0, 7.0, 6.0
    return scores


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_row_gets_what_it_gets_alone(variant, dtype: torch.dtype) -> None:
    sampler = Sampler(backend_of(variant))
    step = Step(list(WISHES.values()))
    scores = some_scores().repeat(len(WISHES), 1).to(dtype)
    together = step.choose(sampler, scores.clone())
    for row, (name, params) in enumerate(WISHES.items()):
        alone = Step([params]).choose(sampler, scores[:1].clone())
        assert together.tokens[row] == alone.tokens[0]
        if name != "drawn":
            assert together.tokens[row] == [BEST.get(name, 9)]
        assert step.rows.num_tokens[row] == len(PROMPT) + 1
    (logprobs,) = together.logprobs
    raw = scores[0].float().log_softmax(0)
    values = np.frombuffer(logprobs.arrays.logprobs, dtype="<f4")
    assert np.allclose(values, [raw[9], raw[2], raw[9]]), "of the scores before all changes"


@each_backend
def test_a_row_may_end_once_it_has_enough_tokens(variant) -> None:
    sampler = Sampler(backend_of(variant))
    step = Step([WISHES["late"], WISHES["late elsewhere"]])
    scores = some_scores().repeat(2, 1)
    tokens = [step.choose(sampler, scores.clone()).tokens for _ in range(3)]
    assert tokens == [[[9], [11]], [[9], [11]], [[2], [2]]]
