"""Nonfinite logits: the KV of their request is removed from every medium."""

import msgspec
import pytest

from engine_core.request import Request
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.scheduler_output import SchedulerOutput
from tests.fakes.offload_rig import OffloadRig

PROMPT = list(range(37))


def fail(rig: OffloadRig, request: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the oldest step in flight report nonfinite logits of a request."""
    execute = rig.runner.execute

    def fails(output: SchedulerOutput) -> ModelRunnerOutput:
        result = execute(output)
        tokens = [
            [] if seq_id == request.seq_id else row
            for seq_id, row in zip(result.seq_ids, result.sampled_token_ids, strict=True)
        ]
        return msgspec.structs.replace(
            result, failed_seq_ids=[request.seq_id], sampled_token_ids=tokens
        )

    with monkeypatch.context() as patch:
        patch.setattr(rig.runner, "execute", fails)
        rig.collect(rig.in_flight.popleft())


def assert_nobody_finds(rig: OffloadRig, request: Request) -> None:
    rig.run_until_idle()
    assert rig.offloading._manager.num_used == 0
    rig.reset_prefix_cache()
    rig.loads.clear()
    rig.generate(list(request.prompt_token_ids))
    assert rig.loads == []
    rig.assert_idle()


@pytest.mark.parametrize("is_known", [True, False])
def test_corruption_of_a_running_request_discards_its_stored_blocks(
    monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """The blocks are removed even while the medium is still being scanned."""
    rig = OffloadRig()
    request = rig.add_one(PROMPT, 10)
    for _ in range(3):
        rig.step()
    assert rig.offloading._manager.num_used > 0
    with monkeypatch.context() as patch:
        if not is_known:
            patch.setattr(rig.offloading._manager, "contains", lambda keys: None)
        rig.send()
        fail(rig, request, monkeypatch)
    assert_nobody_finds(rig, request)


@pytest.mark.parametrize("copies_end", [True, False])
def test_corruption_found_after_the_end_discards_stored_blocks(
    monkeypatch: pytest.MonkeyPatch, copies_end: bool
) -> None:
    """The request is aborted during the step; its blocks are stored or being stored by then."""
    rig = OffloadRig(async_scheduling=True, finishes=lambda job: True if copies_end else None)
    request = rig.add_one(PROMPT, 20)
    for _ in range(3):
        rig.step()
    assert bool(rig.half.under_way) is not copies_end
    rig.send()
    rig.scheduler.abort_request(request.request_id)
    while len(rig.in_flight) > 1:
        rig.receive()
    assert rig.offloading._manager.num_used > 0
    fail(rig, request, monkeypatch)
    rig.finishes = lambda job: True
    assert_nobody_finds(rig, request)
