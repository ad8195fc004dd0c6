"""Encoded size of the messages of every step."""

from proto.codec import encode
from proto.messages.engine_io import EngineCoreOutput, EngineCoreOutputs
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.scheduler_output import CachedRequestData, SchedulerOutput


def decodes(count: int) -> SchedulerOutput:
    """A step of decodes late in a long output, none of which needs a new block."""
    return SchedulerOutput(
        epoch=1,
        step=100_000,
        new_requests=[],
        cached_requests=CachedRequestData(
            seq_ids=[1_000_000 + each for each in range(count)],
            num_computed_tokens=[7_000] * count,
            num_scheduled_tokens=[1] * count,
            new_block_ids=[None] * count,
        ),
        total_num_scheduled_tokens=count,
        finished_seq_ids=[],
        preempted_seq_ids=[],
    )


def test_a_continuing_decode_adds_at_most_16_bytes_to_a_step():
    added = (len(encode(decodes(256))) - len(encode(decodes(1)))) / 255
    assert added <= 16


def test_a_decoded_token_adds_few_bytes_to_results_and_outputs():
    def result(count: int) -> ModelRunnerOutput:
        return ModelRunnerOutput(
            1, 100_000, [1_000_000 + each for each in range(count)], [[49_000]] * count
        )

    def outputs(count: int) -> EngineCoreOutputs:
        return EngineCoreOutputs(
            1,
            100_000,
            1.5,
            [EngineCoreOutput((1 << 55) + each, 0, 500, [49_000]) for each in range(count)],
        )

    assert (len(encode(result(256))) - len(encode(result(1)))) / 255 <= 16
    assert (len(encode(outputs(256))) - len(encode(outputs(1)))) / 255 <= 32
