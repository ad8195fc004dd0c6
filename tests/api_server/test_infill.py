"""Filling in: POST /infill, and `suffix` in /v1/completions, against a scripted engine.

The oracle of token ids is llama.cpp (`infill_vocabularies.py`).
"""

import json
from typing import Any

import pytest
from msgspec import structs
from tokenizers import Tokenizer

from deploy.models import gguf_header, gguf_tokenizer
from proto.settings.config import FrontEndConfig
from tests.api_server import infill_vocabularies
from tests.api_server.conftest import prepared
from tests.api_server.infill_vocabularies import (
    CONTEXTS,
    REQUESTS,
    VOCABULARIES,
    shortened,
    write,
)

RECORDED = json.loads(infill_vocabularies.RECORDED.read_text())
CODE = {"input_prefix": "def f(x):\n", "input_suffix": "\n", "n_predict": 4}


@pytest.fixture
def vocabulary(tmp_path):
    """vocabulary(name): a prepared model with this vocabulary, and the ids of its tokens."""

    def load(name: str):
        path, ids = write(tmp_path, name)
        metadata = {**gguf_header.read(str(path)).values, "general.architecture": "qwen2"}
        tokenizer, settings, _ = gguf_tokenizer.convert(str(path), metadata)
        (tmp_path / "tokenizer.json").write_bytes(tokenizer)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        model = prepared(tmp_path, len(ids), has_chat_template=False)
        eos = ids[VOCABULARIES[name][1]["eos_token_id"]]
        return structs.replace(model, eos_token_ids=(eos,)), ids

    return load


def writes(*token_ids: int) -> Any:
    """Return the script of an engine that samples these tokens for every request."""
    return lambda request, choice: list(token_ids)


@pytest.mark.parametrize("name", VOCABULARIES)
async def test_prompts_are_those_of_llama_cpp(start, vocabulary, name):
    model, _ = vocabulary(name)
    expected = iter(RECORDED[name]["prompts"])
    for context in CONTEXTS:
        for spm in (False, True):
            config = FrontEndConfig(spm_infill=spm)
            async with start(
                writes(300), served=model, max_model_len=context, config=config
            ) as end:
                for body in REQUESTS:
                    answer = await end.http.post("/infill", json={**body, "n_predict": 1})
                    assert answer.status_code == 200, answer.text
                    request = await end.engine.requests.get()
                    assert shortened(list(request.prompt_token_ids)) == next(expected), body
                    assert {*RECORDED[name]["ends"]} <= request.sampling_params.stop_ids
    assert next(expected, None) is None


async def test_the_answer_has_the_form_of_llama_cpp(start, vocabulary):
    model, ids = vocabulary("qwen")
    script = writes(ids["a"], ids["Ċ"], ids["b"], ids["<|file_sep|>"])
    async with start(script, served=model) as end:
        body = CODE | {"prompt": "y", "n_predict": 9, "return_tokens": True, "seed": 5}
        answer = (await end.http.post("/infill", json=body)).json()
        assert answer["content"] == "a\nb"
        assert answer["tokens"] == [ids["a"], ids["Ċ"], ids["b"], ids["<|file_sep|>"]]
        assert (answer["stop"], answer["stop_type"], answer["stopping_word"]) == (True, "eos", "")
        assert answer["has_new_line"]
        assert not answer["truncated"]
        assert answer["prompt"] == (
            "<|repo_name|>myproject\n<|file_sep|>filename\n"
            "<|fim_prefix|>def f(x):\ny<|fim_suffix|>\n<|fim_middle|>"
        )
        request = await end.engine.requests.get()
        assert answer["tokens_evaluated"] == len(request.prompt_token_ids)
        assert answer["tokens_predicted"] == answer["timings"]["predicted_n"] == 4
        settings = answer["generation_settings"]
        assert (settings["seed"], settings["n_predict"], settings["n_ctx"]) == (5, 9, 256)
        assert (settings["temperature"], settings["top_k"]) == (0.8, 40)  # llama.cpp's defaults
        assert request.sampling_params.max_tokens == 9
        assert not (await end.http.post("/infill", json=CODE)).json()["tokens"]


async def test_a_stream_has_the_same_content(start, vocabulary):
    model, ids = vocabulary("deepseek")
    async with start(writes(*[ids[each] for each in "abcdef"]), served=model) as end:
        body = CODE | {"n_predict": 9, "stop": "de", "stream": True, "n_probs": 2}
        answer = await end.http.post("/infill", json=body)
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.text.endswith("\n\n")
        events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line]
        assert "".join(event["content"] for event in events) == "abc"
        assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
        last = events[-1]
        assert (last["stop_type"], last["stopping_word"]) == ("word", "de")
        assert sum(len(event["tokens"]) for event in events) == last["tokens_predicted"] == 5
        entry = events[0]["completion_probabilities"][0]
        assert (entry["id"], entry["token"], entry["bytes"]) == (ids["a"], "a", [97])
        assert len(entry["top_logprobs"]) == 2


async def test_llama_vim_gets_the_fields_that_it_asks_for(start, vocabulary):
    """Its fields for llama.cpp's slots, limits and samplers are named as ignored."""
    model, ids = vocabulary("qwen")
    body = CODE | {
        "id_slot": 0,
        "n_indent": 4,
        "top_k": 40,
        "top_p": 0.9,
        "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000,
        "response_fields": ["content", "timings/prompt_n", "timings/none", "truncated"],
    }
    async with start(writes(*[ids["a"]] * 5), served=model) as end:
        answer = await end.http.post("/infill", json=body)
        assert answer.json() == {
            "content": "aaaa",
            "timings/prompt_n": len((await end.engine.requests.get()).prompt_token_ids),
            "truncated": False,
        }
        ignored = answer.headers["x-tokend-ignored"].split(", ")
        assert set(ignored) == body.keys() & {
            *("id_slot", "n_indent", "samplers", "t_max_prompt_ms", "t_max_predict_ms")
        }
        warm = {**body, "n_predict": 0, "response_fields": [""], "cache_prompt": False}
        assert (await end.http.post("/infill", json=warm)).json() == {}
        request = await end.engine.requests.get()
        assert request.sampling_params.max_tokens == 1
        assert request.skip_reading_prefix_cache
        whole = await end.http.post("/infill", json=CODE | {"n_predict": 0})
        assert (whole.json()["content"], whole.json()["tokens_predicted"]) == ("", 0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_prefix": None}, "input_prefix"),
        ({"input_suffix": 5}, "input_suffix"),
        ({"input_extra": {"text": "a"}}, "input_extra"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra"),
        ({"input_extra": [{"filename": 1, "text": "a"}]}, "input_extra"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "a" * 300}, "prompt"),
        ({"n_predict": -2}, "n_predict"),
        ({"n_probs": 21}, "n_probs"),
        ({"n_cmpl": 2}, "n_cmpl"),
        ({"n": 2}, "n_cmpl"),
        ({"mirostat": 2}, "mirostat"),
        ({"repeat_penalty": 1.1}, "repeat_penalty"),
        ({"temperature": -1}, "temperature"),
        ({"logit_bias": [[1]]}, "logit_bias"),
        ({"model": "other"}, "model"),
        ({"messages": []}, "messages"),
    ],
)
async def test_infill_refuses_by_name(start, vocabulary, fields, param):
    model, _ = vocabulary("qwen")
    async with start(writes(1), served=model) as end:
        answer = await end.http.post("/infill", json=CODE | fields)
        assert answer.status_code == (404 if param == "model" else 400)
        assert answer.json()["error"]["param"] == param


async def test_settings_of_the_sampling_reach_the_engine(start, vocabulary):
    model, _ = vocabulary("qwen")
    async with start(writes(1), served=model) as end:
        fields = {"logit_bias": [[5, 1.5], [6, False]], "max_tokens": 3, "frequency_penalty": 0.5}
        await end.http.post("/infill", json=CODE | fields | {"n_predict": None, "grammar": ""})
        params = (await end.engine.requests.get()).sampling_params
        assert params.max_tokens == 3
        assert params.edits is not None
        assert (params.edits.bias_token_ids, params.edits.bias_values) == ((5, 6), (1.5, -100.0))
        assert params.edits.frequency_penalty == 0.5
        assert (params.top_p, params.min_p) == (0.95, 0.05)


@pytest.mark.parametrize("name", VOCABULARIES)
async def test_suffix_makes_a_prompt_of_both_texts(start, vocabulary, name, tmp_path):
    """The prefix may be a text, token ids or several; the tokens of a file's end stop it."""
    model, ids = vocabulary(name)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    infill = next(iter(REQUESTS))
    before, after = infill["input_prefix"], infill["input_suffix"]
    names = [each for each in VOCABULARIES[name][0] if "_prefix" in each or "begin▁" not in each]
    prefix, suffix = (
        tokenizer.encode(text, add_special_tokens=False).ids for text in (before, after)
    )
    async with start(writes(ids["a"], max(ids.values())), served=model) as end:
        seen = []
        for prompt in (before, prefix, [before, before], [prefix]):
            answer = await end.complete(prompt=prompt, suffix=after, max_tokens=2)
            assert answer.status_code == 200, answer.text
            for _ in answer.json()["choices"]:
                request = await end.engine.requests.get()
                seen.append(list(request.prompt_token_ids))
                ends = request.sampling_params.stop_ids
        assert len(seen) == 5
        assert all(each == seen[0] for each in seen)
        (found,) = {tuple(seen[0])}
        text = tokenizer.decode(found, skip_special_tokens=False)
        assert before in text
        assert text.index(before) < text.index(after)
        assert found[-1] in [ids[each] for each in names]
        assert len(found) == len(prefix) + len(suffix) + (4 if name in ("deepseek", "gemma") else 3)
        assert {*RECORDED[name]["ends"]} <= ends
        bare = await end.complete(
            prompt=before, suffix=after, max_tokens=2, add_special_tokens=False
        )
        assert bare.status_code == 200
        assert len((await end.engine.requests.get()).prompt_token_ids) == len(prefix + suffix) + 3


async def test_suffix_goes_with_the_other_fields(start, vocabulary):
    model, ids = vocabulary("starcoder")
    script = writes(ids["a"], ids["b"], ids["<file_sep>"], ids["c"])
    async with start(script, served=model) as end:
        fields = {"prompt": "x = ", "suffix": "\n", "max_tokens": 8, "n": 2, "logprobs": 1}
        choices = (await end.complete(**fields)).json()["choices"]
        assert [choice["text"] for choice in choices] == ["ab", "ab"]
        assert [choice["finish_reason"] for choice in choices] == ["stop", "stop"]
        assert choices[0]["logprobs"]["text_offset"][:2] == [0, 1]
        whole = fields | {"n": 1, "logprobs": None, "echo": True, "return_prompt_text": True}
        (choice,) = (await end.complete(**whole)).json()["choices"]
        assert choice["text"] == "x = ab"
        assert choice["prompt_text"] == "<fim_prefix>x = <fim_suffix>\n<fim_middle>"
        events = await end.events("/v1/completions", **(whole | {"return_prompt_text": False}))
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "x = ab"
        ids_of_x = [ids["x"], ids["Ġ"]]
        (choice,) = (await end.complete(**(whole | {"prompt": ids_of_x}))).json()["choices"]
        assert choice["text"] == "x ab"
        # A model that goes on after <file_sep> without a suffix still does
        plain = (await end.complete(max_tokens=4, suffix="")).json()["choices"][0]
        assert plain["text"] == "abc"
        assert plain["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": 5}, "suffix"),
        ({"suffix": "a" * 70_000}, "suffix"),
        ({"suffix": "b", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"suffix": "b", "echo": True, "logprobs": 1}, "echo"),
        ({"suffix": "b" * 300}, "prompt"),
        ({"suffix": "b", "prompt": [1 << 40]}, "prompt"),
        ({"suffix": "b", "prompt": []}, "prompt"),
        ({"suffix": "b", "prompt": 7}, "prompt"),
        ({"suffix": "b", "prompt": [["a"]]}, "prompt"),
    ],
)
async def test_suffix_refuses_by_name(start, vocabulary, fields, param):
    model, _ = vocabulary("qwen")
    async with start(writes(1), served=model) as end:
        answer = await end.complete(**({"prompt": "a"} | fields))
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param


async def test_a_model_without_the_tokens_says_so(start, scripted):
    async with start(scripted("!")) as end:
        for path, body, param in (
            ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
            ("/infill", CODE, "input_suffix"),
        ):
            answer = await end.http.post(path, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param)
            assert (
                "no token for the prefix, suffix, middle, such as <|fim_prefix|>"
                in error["message"]
            )
        for suffix in ("", None):
            assert (await end.complete(suffix=suffix)).json()["choices"][0]["text"] == "!"
        chat = await end.chat(suffix="b")
        assert (chat.status_code, chat.json()["error"]["param"]) == (400, "suffix")
