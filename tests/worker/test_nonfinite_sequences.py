"""The model runner reports sequences that read a NaN; other sequences are unaffected."""

import pytest
import torch

from proto.messages.logit_edits import LogitEdits
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.sampling_params import SamplingParams
from proto.messages.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from tests.fakes.devices import CPU, create_backend, create_sampler
from tests.fakes.prepared_models import prepare_checkpoint, spec_of
from tests.fakes.tiny_checkpoints import save_tiny
from worker.attention.kv_cache import KVCache, kv_cache_geometry, kv_layout
from worker.batch.input_batch import InputBatch
from worker.loader.weights import load_model
from worker.models.decoder import Decoder
from worker.step.model_runner import ModelRunner

BLOCK = 4
PROMPTS = {1: [5, 6, 7, 8, 9], 2: [10, 11, 12]}
TABLES = {1: [1, 2], 2: [3, 4]}


class Runner:
    """A tiny model over a cache that tests can overwrite; builds steps by hand.

    params: of both sequences, or by seq_id.
    """

    def __init__(
        self, decoder: Decoder, backend: str, params: SamplingParams | dict[int, SamplingParams]
    ) -> None:
        spec, layout = decoder.spec, kv_layout(decoder.spec.windows)
        heads = spec.attention_shape
        geometry = kv_cache_geometry(layout, heads.num_kv_heads, heads.head_dim, torch.float32)
        self.cache = KVCache(geometry, layout, 10, BLOCK)
        shape = spec.attention_shape
        attention = create_backend(backend, self.cache, shape)
        rows = InputBatch(2, spec.max_position, BLOCK, layout.num_groups)
        self._runner = ModelRunner(
            decoder, attention, create_sampler(), rows, self.cache, CPU.transfers()
        )
        self._params = params if isinstance(params, dict) else dict.fromkeys(PROMPTS, params)
        self._step = 0

    def start(self, num_scheduled: dict[int, int]) -> ModelRunnerOutput:
        """Run the first step with the given number of tokens of each prompt."""
        return self._execute(
            [
                NewRequestData(
                    seq_id=seq_id,
                    prompt_token_ids=prompt,
                    output_token_ids=[],
                    sampling_params=self._params[seq_id],
                    seed=3,
                    choice=0,
                    block_ids=[TABLES[seq_id]],
                    num_computed_tokens=0,
                    num_scheduled_tokens=num_scheduled[seq_id],
                )
                for seq_id, prompt in PROMPTS.items()
            ],
            CachedRequestData(),
        )

    def decode(self, num_computed: dict[int, int]) -> ModelRunnerOutput:
        seq_ids = list(num_computed)
        counts = list(num_computed.values())
        cached = CachedRequestData(seq_ids, counts, [1] * len(seq_ids), [None] * len(seq_ids))
        return self._execute([], cached)

    def _execute(self, new: list[NewRequestData], cached: CachedRequestData) -> ModelRunnerOutput:
        self._step += 1
        return self._runner.execute(
            SchedulerOutput(
                epoch=1,
                step=self._step,
                new_requests=new,
                cached_requests=cached,
                total_num_scheduled_tokens=1,
                finished_seq_ids=[],
                preempted_seq_ids=[],
            )
        )


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny("llama", folder)
    prepared = prepare_checkpoint(folder, folder / "prepared")
    return load_model(prepared, spec_of(prepared), torch.float32, CPU, lambda fraction: None)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=8, temperature=0.0),
        SamplingParams(max_tokens=8, temperature=1.0, top_k=5, top_p=0.9, min_p=0.01, logprobs=2),
    ],
    ids=["greedy", "sampled"],
)
def test_a_failed_sequence_samples_nothing_even_with_a_step_in_flight(
    decoder: Decoder, backend: str, params: SamplingParams
) -> None:
    whole, failing = (Runner(decoder, backend, params) for _ in range(2))
    lengths = {seq_id: len(prompt) for seq_id, prompt in PROMPTS.items()}
    for runner in (whole, failing):
        assert runner.start(lengths).failed_seq_ids == []
    failing.cache.buffer[TABLES[1][0]] = float("nan")
    for _ in range(2):
        expected, found = whole.decode(lengths), failing.decode(lengths)
        assert (expected.failed_seq_ids, found.failed_seq_ids) == ([], [1])
        assert found.sampled_token_ids == [[], expected.sampled_token_ids[1]]
        assert found.logprobs == [each for each in expected.logprobs if each.seq_id == 2]
        lengths = {seq_id: length + 1 for seq_id, length in lengths.items()}


def test_a_failed_sequence_is_reported_during_its_prefill(decoder: Decoder) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0, prompt_logprobs=1)
    runner = Runner(decoder, "auto", params)
    assert runner.start({1: 2, 2: 3}).failed_seq_ids == []
    runner.cache.buffer[TABLES[1][0]] = float("nan")
    found = runner.decode({1: 2, 2: 3})
    assert found.failed_seq_ids == [1]
    assert found.prompt_logprobs == []


def test_nonfinite_logits_of_finite_hidden_states_are_reported(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(decoder, "auto", SamplingParams(max_tokens=8, temperature=0.0))
    compute_logits = decoder.logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        found = compute_logits(hidden)
        found[1, 7] = float("nan")
        return found

    monkeypatch.setattr(decoder, "logits", logits)
    found = runner.start({1: 5, 2: 3})
    assert found.failed_seq_ids == [2]
    assert [len(tokens) for tokens in found.sampled_token_ids] == [1, 0]


@pytest.mark.parametrize("failing", [None, 1, 2])
def test_plain_greedy_rows_do_not_depend_on_edited_rows(
    decoder: Decoder, failing: int | None
) -> None:
    """Both rows have the tokens of a uniform batch, also if the other row fails."""
    plain = SamplingParams(max_tokens=8, temperature=0.0)
    edits = LogitEdits(repetition_penalty=1.4, bad_words=((3,),), presence_penalty=1.0)
    other = SamplingParams(max_tokens=8, temperature=0.9, logprobs=2, edits=edits)
    runners = [Runner(decoder, "auto", params) for params in (plain, other, {1: plain, 2: other})]
    lengths = {seq_id: len(prompt) for seq_id, prompt in PROMPTS.items()}
    for runner in runners:
        runner.start(lengths)
    for step in range(3):
        if failing is not None and step == 2:
            runners[2].cache.buffer[TABLES[failing][0]] = float("nan")
        computed = {seq_id: length + step for seq_id, length in lengths.items()}
        alike, others, mixed = (runner.decode(computed) for runner in runners)
        broken = [failing] if failing is not None and step == 2 else []
        assert mixed.failed_seq_ids == broken
        assert mixed.sampled_token_ids == [
            [] if 1 in broken else alike.sampled_token_ids[0],
            [] if 2 in broken else others.sampled_token_ids[1],
        ]
        assert [row.seq_id for row in mixed.logprobs] == ([] if 2 in broken else [2])
