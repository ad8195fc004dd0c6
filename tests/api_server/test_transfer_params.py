"""Transfer parameters of a KV connector at the end of a request (KVH-10)."""

import asyncio
import json

import pytest

from proto.codec import to_json_line
from proto.messages.engine_io import FinishReason
from proto.settings.kv_peer import TransferParams

FIELDS = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}
TRANSFER_PARAMS = {"remote_block_ids": [7, 3], "remote_host": "a"}


@pytest.mark.parametrize("path", FIELDS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("expected", [{"kv_transfer_params": TRANSFER_PARAMS}, {}])
async def test_transfer_params_are_in_the_last_chunk_and_the_body(start, path, stream, expected):
    async with start() as front_end:
        fields = {**FIELDS[path], "max_tokens": 2}
        whole = front_end.http.post
        ask = front_end.events(path, **fields) if stream else whole(path, json=fields)
        answer = asyncio.create_task(ask)
        request = await front_end.engine.requests.get()
        front_end.engine.accept(request)
        front_end.engine.emit(request, [40])
        encoded = b'{"remote_block_ids":[7,3],"remote_host":"a"}' if expected else b""
        front_end.engine.emit(request, [41], finish=FinishReason.LENGTH, kv_transfer_params=encoded)
        events = (await answer)[:-1] if stream else [(await answer).json()]
        key = "kv_transfer_params"
        assert {name: value for name, value in events[-1].items() if name == key} == expected
        assert not any(key in event for event in events[:-1])


# Prefill and decode in two daemons

PEER = {
    "kv_connector": "PeerConnector",
    "kv_connector_extra_config": {"key_file": "read by workers alone"},
}
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What vllm-router sends to the prefill."""
ANSWER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[7, 3]],
    "remote_engine_id": "e" * 32,
    "remote_request_id": "a" * 32,
    "remote_host": "127.0.0.1",
    "remote_port": 7000,
    "tp_size": 1,
    "remote_workers": [{"id": "b" * 32, "port": 7000}],
}


def without(name):
    return {key: value for key, value in ANSWER.items() if key != name}


@pytest.mark.parametrize("path", FIELDS)
@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (PREFILL, {"do_remote_decode": True}),
        (ANSWER, ANSWER),
        ({**ANSWER, "remote_num_tokens": 9, "transfer_id": "x"}, ANSWER),
        ({}, None),
        ({"do_remote_prefill": False, "remote_block_ids": [[]]}, None),
    ],
)
async def test_the_engine_gets_what_a_router_sends(start, path, sent, expected):
    """Fields of other servers are left out; parameters that ask for nothing are none."""
    async with start(kv_transfer_config=json.dumps(PEER)) as front_end:
        fields = {**FIELDS[path], "kv_transfer_params": sent}
        answer = asyncio.create_task(front_end.http.post(path, json=fields))
        request = await front_end.engine.requests.get()
        front_end.engine.accept(request)
        front_end.engine.emit(request, [41], finish=FinishReason.LENGTH)
        assert (await answer).status_code == 200
        given = request.kv_transfer_request
        assert (json.loads(given) if given else None) == (
            expected and {**json.loads(to_json_line(TransferParams())), **expected}
        )


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"do_remote_decode": 1}, "do_remote_decode"),
        ({**ANSWER, "do_remote_decode": True}, "both do_remote_prefill and do_remote_decode"),
        ({**ANSWER, "remote_block_ids": [1, 2]}, "remote_block_ids"),
        ({**ANSWER, "remote_block_ids": [["x"]]}, "remote_block_ids"),
        ({**ANSWER, "remote_request_id": "../../etc"}, "remote_request_id was not made by tokend"),
        ({**ANSWER, "remote_engine_id": "E" * 32}, "remote_engine_id was not made by tokend"),
        ({**ANSWER, "remote_host": "10.9.8.7"}, "none of this server's peers"),
        ({**ANSWER, "remote_host": 7}, "remote_host"),
        ({**ANSWER, "tp_size": 2}, "tp_size is 2, remote_workers has 1"),
        ({**ANSWER, "remote_workers": []}, "1 to 256 workers, got 0"),
        ({**ANSWER, "remote_workers": [{"id": "../x", "port": 1}]}, "../x was not made by tokend"),
        (
            {**ANSWER, "remote_workers": [{"id": "b" * 32, "port": 1 << 16}]},
            "remote_workers[0].port",
        ),
        ({"do_remote_decode": True, "remote_port": 10**20}, "remote_port"),
        ({"do_remote_decode": True, "remote_block_ids": [[10**20]]}, "remote_block_ids[0][0]"),
        ({"do_remote_decode": True, "tp_size": 10**20}, "tp_size"),
        ({**ANSWER, "remote_host": "\ud800"}, "remote_host is no IP address"),
        ({**ANSWER, "remote_block_ids": [[-1]]}, "remote_block_ids[0][0]"),
        *[(without(name), f"{name} is missing") for name in ANSWER if name.startswith("remote_e")],
        (without("remote_workers"), "remote_workers is missing"),
    ],
)
async def test_wrong_params_are_refused_by_name(start, params, named):
    async with start(kv_transfer_config=json.dumps(PEER)) as front_end:
        fields = {**FIELDS["/v1/completions"], "kv_transfer_params": params}
        body = json.dumps(fields)  # httpx does not send unpaired surrogates as they are
        answer = await front_end.http.post(
            "/v1/completions", content=body, headers={"content-type": "application/json"}
        )
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "kv_transfer_params")
        assert named in error["message"]


@pytest.mark.parametrize(
    ("config", "params", "named"),
    [
        (None, PREFILL, "has a PeerConnector"),
        ({"kv_connector": "OffloadingConnector"}, PREFILL, "has a PeerConnector"),
        ({**PEER, "kv_role": "kv_consumer"}, PREFILL, "kv_consumer, which keeps no KV"),
        ({**PEER, "kv_role": "kv_producer"}, ANSWER, "kv_producer, which loads no KV"),
    ],
)
async def test_params_need_a_connector_in_that_role(start, config, params, named):
    text = None if config is None else json.dumps(config)
    async with start(kv_transfer_config=text) as front_end:
        fields = {**FIELDS["/v1/completions"], "kv_transfer_params": params}
        answer = await front_end.http.post("/v1/completions", json=fields)
        assert answer.status_code == 400
        assert named in answer.json()["error"]["message"]


async def test_a_connector_from_outside_gets_any_params(start):
    async with start(kv_transfer_config='{"kv_connector": "mine:Mine"}') as front_end:
        fields = {**FIELDS["/v1/completions"], "kv_transfer_params": {"my": [1]}}
        answer = asyncio.create_task(front_end.http.post("/v1/completions", json=fields))
        request = await front_end.engine.requests.get()
        assert request.kv_transfer_request == b'{"my":[1]}'
        front_end.engine.accept(request)
        front_end.engine.emit(request, [41], finish=FinishReason.LENGTH)
        assert (await answer).status_code == 200


async def test_params_are_for_one_prompt(start):
    async with start(kv_transfer_config=json.dumps(PEER)) as front_end:
        fields = {"prompt": ["a", "b"], "kv_transfer_params": PREFILL}
        answer = await front_end.http.post("/v1/completions", json=fields)
        assert answer.status_code == 400
        assert "is for one prompt" in answer.json()["error"]["message"]
