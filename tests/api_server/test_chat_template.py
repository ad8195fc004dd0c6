"""Chat templates render like transformers, in a sandbox."""

import contextlib

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from api_server.text.chat_template import (
    ChatTemplate,
    Conversation,
    find_chat_templates,
)
from api_server.text.rendering import TemplateRenderer
from api_server.text.tokenizer import special_token_texts
from proto.errors import InvalidRequestError, ModelError

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
CONVERSATIONS = [
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "system", "content": "  Be brief.  \n"},
        {"role": "user", "content": 'naïve 你好 😀 <|im_end|> "quoted" & <b>'},
        {"role": "assistant", "content": "line\nline\n\n"},
        {"role": "user", "content": ""},
    ],
]
TEMPLATES = {
    "chatml with a default system message": (
        "{% for message in messages %}"
        "{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
        "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "blocks on lines of their own": """{{ bos_token }}
{%- set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- continue %}
    {%- endif %}
    {%- set ns.count = ns.count + 1 %}
[{{ message.role | upper }}] {{ message.content | trim }}
    {% if message.role == 'assistant' %}
    {% generation %}
    {{ message.content }}{{ eos_token }}
    {% endgeneration %}
    {% endif %}
{% endfor %}
{{ ns.count }} {{ messages | tojson }} {{ messages | tojson(indent=2) }}
{% if tools is defined and tools is not none %}tools{% endif %}
{{ unknown_variable }}{{ messages | map(attribute='role') | join(',') }}
{% for number in range(10) %}{% if number == 3 %}{% break %}{% endif %}{{ number }}{% endfor %}
""",
}


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["one", "four"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_like_transformers(name: str, messages: list[dict[str, str]]) -> None:
    (expected,), _ = render_jinja_template(
        conversations=[messages],
        chat_template=TEMPLATES[name],
        add_generation_prompt=True,
        **SPECIALS,
    )
    assert ChatTemplate(TEMPLATES[name], SPECIALS).render(Conversation(messages)) == expected


def test_the_current_date_is_available() -> None:
    rendered = ChatTemplate("{{ strftime_now('%Y') }}", {}).render(Conversation([]))
    assert rendered.isdecimal()
    assert len(rendered) == 4


def test_a_template_may_raise_an_exception() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        template.render(Conversation(CONVERSATIONS[0]))
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0]['role'] + 1 }}",
        "{{ messages[9]['role'] + 'x' }}",
    ],
)
def test_template_errors_are_invalid_requests(source: str) -> None:
    template = ChatTemplate(source, {})
    with pytest.raises(InvalidRequestError):
        template.render(Conversation(CONVERSATIONS[0]))


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ ''['__class__'] }}",
        "{{ messages|attr('__class__') }}",
    ],
)
def test_templates_cannot_reach_the_interpreter(source: str) -> None:
    template = ChatTemplate(source, {})
    rendered = ""
    with contextlib.suppress(InvalidRequestError):
        rendered = template.render(Conversation(CONVERSATIONS[0]))
    assert rendered == ""


def test_an_invalid_template_is_a_start_error() -> None:
    with pytest.raises(ModelError, match="line 2"):
        ChatTemplate("\n{% for %}", {})


async def test_a_base_model_has_no_template(tmp_path) -> None:
    assert find_chat_templates((str(tmp_path),), {}) == {}
    with pytest.raises(InvalidRequestError, match="base has no chat template"):
        await TemplateRenderer(None, "base").render(Conversation(CONVERSATIONS[0]))


def test_special_tokens_as_text_or_object(tmp_path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        '{"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": null, "x": 1}'
    )
    assert special_token_texts(str(tmp_path)) == {"bos_token": "<s>", "eos_token": "</s>"}
