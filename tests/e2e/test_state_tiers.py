"""Recurrent states in host memory, on a disk and in Redis: a conversation through real daemons.

A tiny Mamba-2 hybrid of random weights answers the turns of a conversation. Its tokens are those of
transformers with every tier, after a restart, after the death of a worker and with damaged files,
and a tier has what the engine does not compute again.
"""

import copy
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from proto.settings.kv_media import HEADER_BYTES
from tests.e2e.daemon import Daemon, eventually
from tests.e2e.reference import Reference, packaged_model
from tests.e2e.test_kv_tiers import (
    FAILURES,
    STORED,
    block_files,
    flip_bit,
    offloading,
    on_disk,
    remote,
    start_daemon,
    truncate,
)
from tests.e2e.test_parity import assert_greedy_tokens
from tests.fakes.kv_media import needs_redis, redis_server
from tests.fakes.tiny_checkpoints import CONFIGS, tiny_model

pytestmark = pytest.mark.suite("media")

BLOCK = 16
NUM_TURNS = 3
NUM_OUTPUTS = 20
FIRST = list(range(1000, 1070))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    """The folder of a hybrid with Mamba-2 layers, experts and attention, and its reference."""
    folder = tmp_path_factory.mktemp("hybrid")
    config = copy.deepcopy(CONFIGS["granitehybrid"])
    config.vocab_size, config.max_position_embeddings = 49152, 512
    made = tiny_model(config)
    made.save_pretrained(folder)
    shutil.copy(Path(packaged_model().folder) / "tokenizer.json", folder)
    return folder, Reference(made, None)


def start(model: tuple[Path, Reference], connector: dict[str, object]) -> Daemon:
    return start_daemon(connector, model=str(model[0]))


def answer(daemon: Daemon, prompt: list[int], num_outputs: int) -> tuple[list[int], int]:
    """Return the tokens of an answer, and how many tokens of the prompt were not computed."""
    body = {
        "prompt": prompt,
        "max_tokens": num_outputs,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=300)
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    return (
        response.json()["choices"][0]["token_ids"],
        usage["prompt_tokens_details"]["cached_tokens"],
    )


class Conversation:
    """A conversation that grows turn by turn; checks each answer."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self.history: list[int] = []

    def take_turn(self, daemon: Daemon) -> int:
        """Take a turn; return how many tokens were computed again.

        All but the last block of the turns before should be found: what ends within a block, and
        the last token of an answer, are computed with the next turn.
        """
        reusable = max(0, len(self.history) - 1) // BLOCK * BLOCK
        prompt = [*self.history, *[token + len(self.history) for token in FIRST]]
        tokens, num_cached = answer(daemon, prompt, NUM_OUTPUTS)
        assert_greedy_tokens(self._reference, [prompt], [tokens])
        self.history = [*prompt, *tokens]
        assert eventually(lambda: daemon.metric("vllm:kv_cache_usage_perc") == 0)
        return reusable - num_cached


def forget(daemon: Daemon) -> None:
    """Empty the device's prefix cache, of KV and of states."""
    assert httpx.post(f"{daemon.url}/reset_prefix_cache", timeout=60).status_code == 200


def kill_worker(daemon: Daemon) -> None:
    os.kill(daemon.processes()["worker"].pid, signal.SIGKILL)


def test_turns_go_on_from_states_in_host_memory(model: tuple[Path, Reference]) -> None:
    conversation = Conversation(model[1])
    with start(model, offloading(cpu_bytes_to_use=1 << 27)) as daemon:
        for _ in range(NUM_TURNS):
            assert conversation.take_turn(daemon) == 0
            forget(daemon)
        assert daemon.metric("vllm:external_prefix_cache_hits_total") > 0
        kill_worker(daemon)  # host memory starts empty
        assert conversation.take_turn(daemon) > 0
        forget(daemon)
        assert conversation.take_turn(daemon) == 0
        assert daemon.metric(FAILURES) == 0


@pytest.mark.parametrize("is_second", [False, True])
def test_a_restarted_daemon_answers_the_next_turn_from_its_disk(
    is_second: bool, model: tuple[Path, Reference], tmp_path: Path
) -> None:
    """Nothing of the turns before is computed again but the rest of a block.

    is_second: host memory is asked first, which is empty after the restart.
    """
    conversation = Conversation(model[1])
    connector = on_disk(tmp_path / "kv")
    if is_second:
        media = [offloading(cpu_bytes_to_use=1 << 27), connector]
        connector = {
            "kv_connector": "MultiConnector",
            "kv_connector_extra_config": {"connectors": media},
        }
    with start(model, connector) as first:
        for _ in range(NUM_TURNS):
            conversation.take_turn(first)
        assert eventually(lambda: first.metric(STORED) > 0)
    with start(model, connector) as second:
        assert conversation.take_turn(second) == 0
        kill_worker(second)
        assert conversation.take_turn(second) == 0
        assert second.metric(FAILURES) == 0


@pytest.mark.parametrize("damage", [flip_bit, truncate, os.unlink])
def test_damaged_states_are_computed_again(
    model: tuple[Path, Reference], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """The files of states are damaged after the daemon has found them; those of KV are whole."""
    conversation = Conversation(model[1])
    connector = on_disk(tmp_path / "kv")
    with start(model, connector) as first:
        for _ in range(2):
            conversation.take_turn(first)
    (folder,) = (path for path in (tmp_path / "kv").iterdir() if path.name.endswith("x0"))
    with start(model, connector) as second:
        files = block_files(folder)
        sizes = {path.stat().st_size for path in files}
        assert len(sizes) == 1
        assert sizes.pop() > HEADER_BYTES + 4 * 3 * 8 * 16 * 16, "a file has a whole state"
        for path in files:
            damage(path)
        assert conversation.take_turn(second) > 0
        assert second.metric(FAILURES) > 0
        assert "Traceback" not in second.text
        forget(second)
        assert conversation.take_turn(second) == 0, "they were stored again"


@needs_redis
def test_daemons_share_states_through_redis(model: tuple[Path, Reference], tmp_path: Path) -> None:
    conversation = Conversation(model[1])
    with redis_server(tmp_path) as server, start(model, remote(server)) as first:
        for _ in range(2):
            conversation.take_turn(first)
        with start(model, remote(server)) as second:
            assert conversation.take_turn(second) == 0
            assert second.metric(FAILURES) == 0
