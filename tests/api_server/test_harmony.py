"""The harmony format: vocabulary, parser and prompts, with `openai-harmony` as the reference."""

import json
import os

import pytest
from openai_harmony import Author, HarmonyError, Message, Role
from openai_harmony import Conversation as Messages
from tokenizers import AddedToken, Tokenizer, decoders, models

from api_server.parsers.harmony import HarmonyParser, HarmonyTokenCounter, open_header
from api_server.text.chat_template import Conversation
from api_server.text.detokenizer import MarkerDetokenizer
from api_server.text.harmony import (
    VOCABULARY_FOLDER,
    HarmonyTemplate,
    load_encoding,
)
from api_server.text.tokenizer import ModelTokenizer
from proto.byte_level import BYTE_LETTERS
from proto.errors import InvalidRequestError, ModelError
from tests.api_server.conftest import byte_level_tokenizer
from tests.api_server.harmony_model import (
    SOURCE,
    harmony_of,
    harmony_tokenizer,
    joined,
    library_encoding,
    marked,
    read,
)
from tests.fakes.o200k import SPECIAL_TOKENS, o200k_ranks

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.find <|constrain|>json<|message|>"
ARGUMENTS = '{"text": "Zürich 😀"}'

WELL_FORMED = {
    "final": (f"{FINAL}Hello 😀<|return|>", ("", "Hello 😀", [])),
    "analysis and final": (f"{ANALYSIS}Hm.{NEXT}{FINAL}Hi.<|return|>", ("Hm.", "Hi.", [])),
    "call": (f"{ANALYSIS}Hm.{NEXT}{CALL}{ARGUMENTS}<|call|>", ("Hm.", "", [("find", ARGUMENTS)])),
    "recipient in the role": (
        f" to=functions.find<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>",
        ("", "", [("find", ARGUMENTS)]),
    ),
    "call in the analysis channel": (
        f"<|channel|>analysis to=functions.find code<|message|>{ARGUMENTS}<|call|>",
        ("", "", [("find", ARGUMENTS)]),
    ),
    "preamble": (
        f"{ANALYSIS}Hm.{NEXT}<|channel|>commentary<|message|>Look:{NEXT}{CALL}{ARGUMENTS}<|call|>",
        ("Hm.", "Look:", [("find", ARGUMENTS)]),
    ),
    "two messages of a kind": (
        f"{ANALYSIS}One.{NEXT}{ANALYSIS}Two.{NEXT}{FINAL}Hi.<|return|>",
        ("One.\n\nTwo.", "Hi.", []),
    ),
    "a recipient that is no function": (
        "<|channel|>commentary to=python code<|message|>print()<|call|>",
        ("", "print()", []),
    ),
    "a function that was not offered": (
        CALL.replace("find", "other") + "{}<|call|>",
        ("", "{}", []),
    ),
    "arguments that are not JSON": (f"{CALL}{{text<|call|>", ("", "{text", [])),
    "no arguments": (f"{CALL}<|call|>", ("", "", [("find", "{}")])),
    "message without a channel": ("<|message|>Hi.<|return|>", ("", "Hi.", [])),
    "empty analysis": (f"{ANALYSIS}{NEXT}{FINAL}Hi.<|return|>", ("", "Hi.", [])),
}
MALFORMED = {
    "no header": ("Hi there.<|return|>", ("", "Hi there.", [])),
    "long text without a header": ("Hi! " * 100 + "<|return|>", ("", "Hi! " * 100, [])),
    "more empty lines than a header is long": (
        "\n" * 258 + "<|channel|>final<|message|>Hi.<|return|>",
        ("", "\n\n" + "\n\nHi.", []),
    ),
    "words in the header": ("oh hello you<|message|>Hi.<|return|>", ("", "Hi.", [])),
    "channel without a name": ("<|channel|><|message|>Hi.<|return|>", ("", "Hi.", [])),
    "no start": (f"{ANALYSIS}Hm.<|end|>{FINAL}Hi.<|return|>", ("Hm.", "Hi.", [])),
    "no end": (f"{ANALYSIS}Hm.{FINAL}Hi.<|return|>", ("Hm.", "Hi.", [])),
    "text after the end": (f"{FINAL}Hi.<|end|>Bye.<|return|>", ("", "Hi.\n\nBye.", [])),
}
HEADERS = [
    " to=functions.find<|channel|>commentary to=functions.find <|constrain|>json",
    "<|channel|>commentary to=functions.find to=functions.find <|constrain|>json",
    "<|channel|>commentary please to=functions.find <|constrain|>json",
    "<|channel|>commentary <|constrain|>json to=functions.find",
    "<|channel|>commentary <|constrain|>jsonto=functions.find code",
    "<|channel|>commentaryto=functions.find",
    "<|channel|>commentary to=functions.findjson",
    "<|channel|>commentary to=functions.find<|constrain|>response",
    "<|channel|>commentary to=functions.find:0 json",
    "<|channel|>commentary to=find <|constrain|>json",
    "<|channel|>commentary find <|constrain|>json",
    "<|channel|>commentary functions.find",
    "<|channel|>final to=functions.find json",
    "<|channel|>––commentary to=functions.find",
    "functions.find<|constrain|>json<|channel|>commentary",
    "find<|channel|>commentary json",
]
"""Headers that name the tool `find`, and have something too much or too little."""
CALLED = ("", "", [("find", ARGUMENTS)])
MALFORMED |= {header: (f"{header}<|message|>{ARGUMENTS}<|call|>", CALLED) for header in HEADERS} | {
    "another tool whose name begins alike": (
        "<|channel|>commentary to=functions.finder json<|message|>{}<|call|>",
        ("", "{}", []),
    ),
    "a tool's name in a header of reasoning": (
        f"<|channel|>analysis find<|message|>Hm.{NEXT}{FINAL}Hi.<|return|>",
        ("Hm.", "Hi.", []),
    ),
    "a tool's name beside another recipient": (
        f"<|channel|>commentary to=browser.open find<|message|>{ARGUMENTS}<|call|>",
        ("", ARGUMENTS, []),
    ),
    "a tool's name in a header of the answer": (
        "<|channel|>final find<|message|>{}<|return|>",
        ("", "{}", []),
    ),
    "text to a tool in the reasoning": (
        "<|channel|>analysis to=functions.find<|message|>Hm.<|call|>",
        ("Hm.", "", []),
    ),
    "many digits after a tool's name": (
        f"<|channel|>commentary to=functions.find{'1' * 60}x<|message|>{{}}<|call|>",
        ("", "{}", []),
    ),
    "the result of a tool": (
        "<|channel|>final<|message|>Hi.<|end|><|start|>functions.find to=assistant"
        "<|channel|>commentary<|message|>{}<|end|>",
        ("", "Hi.\n\n{}", []),
    ),
    "a call without <|message|>": (
        f"<|channel|>commentary to=functions.find <|constrain|>json{ARGUMENTS}<|call|>",
        CALLED,
    ),
    "a long call without <|message|>": (
        f'<|channel|>commentary to=functions.find {{"text": "{"a" * 300}"}}<|call|>',
        ("", "", [("find", f'{{"text": "{"a" * 300}"}}')]),
    ),
    "<|message|> twice": (
        "<|channel|>commentary to=functions.find<|message|><|constrain|>json<|message|>"
        f"{ARGUMENTS}",
        CALLED,
    ),
    "a line break in a string": (
        f'{CALL}{{"text": "a\nb"}}',
        ("", "", [("find", '{"text": "a\\nb"}')]),
    ),
    "reasoning without <|message|>": (
        f"<|channel|>analysis I look.{NEXT}{FINAL}Hi.<|return|>",
        ("I look.", "Hi.", []),
    ),
    "an answer without <|message|>": ("<|channel|>final Hi.<|return|>", ("", "Hi.", [])),
    "a channel that breaks off": (f"<|channel|>commentary{NEXT}{FINAL}Hi.", ("", "Hi.", [])),
    "two channels": (
        f"<|channel|>commentary<|channel|>analysis<|message|>Hm.{NEXT}{FINAL}Hi.",
        ("Hm.", "Hi.", []),
    ),
    "the start twice": (f"{ANALYSIS}Hm.{NEXT}<|start|>assistant{FINAL}Hi.", ("Hm.", "Hi.", [])),
    "a marker in a text": (f"{FINAL}Hi <|message|>there<|constrain|>.", ("", "Hi there.", [])),
}
CASES = WELL_FORMED | MALFORMED


def without_end(text: str) -> str:
    return text.removesuffix("<|return|>").removesuffix("<|call|>")


@pytest.mark.parametrize("name", CASES)
def test_answers_cut_anywhere(name):
    said, expected = CASES[name]
    for text in (marked(said), marked(without_end(said))):  # an end token usually has no text
        assert joined(read([text])) == expected
        assert joined(read(text)) == expected
        for place in range(len(text)):
            assert joined(read([text[:place], text[place:]])) == expected


@pytest.mark.parametrize("name", CASES)
def test_answers_cut_at_every_token_and_byte(name):
    """Through the detokenizers, with one token for each byte."""
    said, expected = CASES[name]
    tokenizer = ModelTokenizer(harmony_tokenizer())
    harmony = harmony_of(harmony_tokenizer())
    small, special = (
        harmony_tokenizer(),
        {f"<|{name}|>": token for name, token in harmony.token_ids.items()},
    )
    by_bytes, rest = [], said
    while rest:
        found = next((one for one in special if rest.startswith(one)), None)
        if found:
            by_bytes.append(special[found])
        else:
            by_bytes += [tokenizer_byte(small, byte) for byte in rest[0].encode()]
        rest = rest[len(found or rest[0]) :]
    for ids in (small.encode(said).ids, by_bytes):
        detokenizer = MarkerDetokenizer(tokenizer.detokenizer([]), harmony.markers)
        assert joined(read([*map(detokenizer.decode_token, ids)])) == expected


def tokenizer_byte(tokenizer: Tokenizer, byte: int) -> int:
    character = BYTE_LETTERS[byte]
    return tokenizer.token_to_id(character)


@pytest.mark.parametrize("name", WELL_FORMED)
def test_the_library_reads_the_same_messages(name):
    said, (reasoning, content, calls) = WELL_FORMED[name]
    encoding = library_encoding().inner
    messages = encoding.parse_messages_from_completion_tokens(
        encoding.encode(said, allowed_special="all"), Role.ASSISTANT
    )
    texts = {"reasoning": [], "content": [], "calls": []}
    for message in messages:
        is_call = message.recipient in ("functions.find", "functions.now")
        kind = "reasoning" if message.channel == "analysis" else "content"
        texts["calls" if is_call else kind].append(message.content[0].text)
    assert "\n\n".join(filter(None, texts["reasoning"])) == reasoning
    if calls or texts["calls"] == []:
        assert "\n\n".join(texts["content"]) == content
    else:  # arguments that are not JSON
        assert texts["calls"] == [content]
    if calls:
        assert [text or "{}" for text in texts["calls"]] == [text for _, text in calls]


@pytest.mark.parametrize("name", ["no start", "text after the end", "words in the header"])
def test_the_library_refuses_what_the_parser_still_reads(name):
    encoding = library_encoding().inner
    tokens = encoding.encode(MALFORMED[name][0], allowed_special="all")
    with pytest.raises(HarmonyError):
        encoding.parse_messages_from_completion_tokens(tokens, Role.ASSISTANT)


def test_markers_in_ordinary_tokens_are_text():
    said = "Harmony writes <|end|> and <|start|>assistant."
    assert joined(read([marked(FINAL), said])) == ("", said, [])


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (ANALYSIS + "Hm", ("Hm", "", [])),
        ("<|channel|>ana", ("", "", [])),
        (f"{ANALYSIS}Hm.{NEXT}<|channel|>commentary to=func", ("Hm.", "", [])),
        (CALL + '{"text": "Z', ("", "", [])),
    ],
)
def test_what_a_limit_cuts_is_no_call_and_no_content(said, expected):
    assert joined(read([marked(said)], is_cut=True)) == expected


@pytest.mark.parametrize(
    ("prompt", "header"),
    [
        ("<|start|>user<|message|>Hi<|end|><|start|>assistant", None),
        (
            f"<|start|>user<|message|>Hi<|end|><|start|>assistant{FINAL}It ",
            "assistant<|channel|>final",
        ),
        ("<|start|>user<|message|>Hi<|end|>", None),
        ("Hi", None),
    ],
)
def test_header_that_a_prompt_leaves_open(prompt, header):
    assert open_header(prompt) == header
    if header is not None:
        assert joined(read(["is cold."], opening=header)) == ("", "is cold.", [])


def test_reasoning_tokens_are_counted():
    tokenizer, harmony = harmony_tokenizer(), harmony_of(harmony_tokenizer())
    said = f"{ANALYSIS}the fox 😀{NEXT}{ANALYSIS}over{NEXT}{FINAL}the sea"
    detokenizer = MarkerDetokenizer(ModelTokenizer(tokenizer).detokenizer([]), harmony.markers)
    counter = HarmonyTokenCounter(detokenizer, HarmonyParser(harmony.encoding, None, ()))
    for token_id in tokenizer.encode(said).ids:
        counter.decode_token(token_id)
    expected = sum(len(tokenizer.encode(text).ids) for text in ("the fox 😀", "over"))
    assert counter.num_tokens == expected


# The vocabulary.


def test_the_library_is_built_from_the_tokenizer_of_the_model(tmp_path, monkeypatch):
    monkeypatch.delenv(VOCABULARY_FOLDER, raising=False)
    ranks = o200k_ranks()
    if ranks is None:
        pytest.skip("the vocabulary o200k is not installed")
    tokenizer = Tokenizer(models.BPE(vocab=ranks, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    assert tokenizer.token_to_id("<|call|>") == 200012
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encoding = load_encoding(tmp_path / "tokenizer.json")
    assert encoding.inner.encode("<|call|>", allowed_special="all") == [200012]
    assert VOCABULARY_FOLDER not in os.environ


def test_another_vocabulary_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv(VOCABULARY_FOLDER, raising=False)
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match=r"o200k.*--reasoning-parser"):
        load_encoding(tmp_path / "tokenizer.json")
    with pytest.raises(ModelError, match=r"no special token <\|start\|>"):
        harmony_of(byte_level_tokenizer())


# Prompts.


def prompt(messages, tools=None, **fields) -> str:
    template = HarmonyTemplate(library_encoding(), SOURCE)
    text = template.render(Conversation(messages, tools, **fields))
    if not fields.get("continue_final_message"):  # the text has the tokens of the library
        encoding = library_encoding()
        ids = encoding.inner.encode(text, allowed_special="all")
        assert encoding.inner.decode(ids) == text
    return text


def call(name, arguments, call_id=None):
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


USER = {"role": "user", "content": "Is it cold?"}
FIND = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Look.\nTwice.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "What."},
                "kind": {"enum": ["a", "b"], "type": "string", "default": "a"},
            },
            "required": ["text"],
        },
    },
}
NOW = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
}


def test_system_and_developer_messages():
    text = prompt(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "developer", "content": "In verse."},
            USER,
        ],
        [FIND, NOW],
        variables={"reasoning_effort": "high", "model_identity": "You are a toy."},
    )
    system, developer, user, start = text.split("<|start|>")[1:]
    assert system.startswith(
        "system<|message|>You are a toy.\nKnowledge cutoff: 2024-06\nCurrent date: 2"
    )
    assert "Reasoning: high" in system
    assert "# Valid channels: analysis, commentary, final." in system
    assert "commentary channel: 'functions'" in system
    assert developer == (
        "developer<|message|># Instructions\n\nBe brief.\n\nIn verse.\n\n# Tools\n\n"
        "## functions\n\nnamespace functions {\n\n// Look.\n// Twice.\n"
        "type find = (_: {\n// What.\ntext: string,\n"
        'kind?: "a" | "b", // default: a\n}) => any;\n\ntype now = () => any;\n\n'
        "} // namespace functions<|end|>"
    )
    assert user == "user<|message|>Is it cold?<|end|>"
    assert start == "assistant"


def rest(messages, **fields) -> str:
    """The prompt after the system message and the first message of the user."""
    text = prompt([USER, *messages], **fields)
    return text.partition("<|start|>user<|message|>Is it cold?<|end|>")[2]


def test_reasoning_is_kept_after_a_call_and_dropped_after_an_answer():
    turn = [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [call("find", {"text": "ü"}, "1")],
        },
        {"role": "tool", "content": "3 degrees", "tool_call_id": "1"},
    ]
    called = (
        "<|start|>assistant to=functions.find<|channel|>commentary <|constrain|>json<|message|>"
        '{"text": "ü"}<|call|>'
        "<|start|>functions.find to=assistant<|channel|>commentary<|message|>3 degrees<|end|>"
    )
    thought = f"<|start|>assistant{ANALYSIS}Hm.<|end|>"
    assert rest(turn) == f"{thought}{called}<|start|>assistant"
    answer = {"role": "assistant", "content": "Yes.", "reasoning_content": "So."}
    final = f"<|start|>assistant{FINAL}Yes.<|end|>"
    asked = "<|start|>user<|message|>Is it cold?<|end|>"
    assert rest([*turn, answer, USER]) == f"{called}{final}{asked}<|start|>assistant"
    assert rest([answer, USER, *turn]) == f"{final}{asked}{thought}{called}<|start|>assistant"


def test_every_result_stands_after_its_call():
    text = rest(
        [
            {
                "role": "assistant",
                "content": "Look:",
                "tool_calls": [call("a", {}, "1"), call("b", {}, "2")],
            },
            {"role": "tool", "content": "of b", "tool_call_id": "2"},
            {"role": "tool", "content": "of a", "tool_call_id": "1"},
        ]
    )
    heads = [part.partition("<|message|>") for part in text.split("<|start|>")[1:]]
    assert [(head.split("<|")[0], body) for head, _, body in heads] == [
        ("assistant", "Look:<|end|>"),
        ("assistant to=functions.a", "{}<|call|>"),
        ("functions.a to=assistant", "of a<|end|>"),
        ("assistant to=functions.b", "{}<|call|>"),
        ("functions.b to=assistant", "of b<|end|>"),
        ("assistant", ""),
    ]
    assert heads[0][0] == "assistant<|channel|>commentary"


def test_later_instructions_are_developer_messages():
    later = rest(
        [{"role": "assistant", "content": "Yes."}, {"role": "system", "content": "In verse."}]
    )
    assert later.endswith(
        "<|start|>developer<|message|># Instructions\n\nIn verse.<|end|><|start|>assistant"
    )


def test_an_answer_can_be_continued():
    said = [{"role": "assistant", "content": "Yes, it"}]
    fields = {"add_generation_prompt": False, "continue_final_message": True}
    assert rest(said, **fields) == f"<|start|>assistant{FINAL}Yes, it"
    with pytest.raises(InvalidRequestError) as raised:
        prompt([USER], **fields)
    assert raised.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("messages", "variables", "param"),
    [
        ([{"role": "tool", "content": "3", "tool_call_id": "1"}], {}, "messages"),
        ([{"role": "critic", "content": "No."}], {}, "messages"),
        ([], {"reasoning_effort": "huge"}, "chat_template_kwargs"),
        ([], {"model_identity": 3}, "chat_template_kwargs"),
    ],
)
def test_errors_name_the_field(messages, variables, param):
    with pytest.raises(InvalidRequestError) as raised:
        prompt([USER, *messages], variables=variables)
    assert raised.value.param == param


def test_a_prompt_is_what_the_library_renders():
    """The ids of the text are the ids that the library renders for the same messages."""
    encoding = library_encoding().inner
    messages = [
        Message.from_role_and_content(Role.USER, "Is it  cold?\n"),
        Message.from_role_and_content(Role.ASSISTANT, "Hm.").with_channel("analysis"),
        Message.from_role_and_content(Role.ASSISTANT, json.dumps({"a": 1}))
        .with_channel("commentary")
        .with_recipient("functions.find")
        .with_content_type("<|constrain|>json"),
        Message.from_author_and_content(Author(role=Role.TOOL, name="functions.find"), "3\n")
        .with_channel("commentary")
        .with_recipient("assistant"),
    ]
    ids = encoding.render_conversation_for_completion(
        Messages.from_messages(messages), Role.ASSISTANT
    )
    text = prompt(
        [
            {"role": "user", "content": "Is it  cold?\n"},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "Hm.",
                "tool_calls": [call("find", {"a": 1}, "1")],
            },
            {"role": "tool", "content": "3\n", "tool_call_id": "1"},
        ]
    )
    after_system = text[text.index("<|start|>user") :]
    assert encoding.encode(after_system, allowed_special="all") == ids
