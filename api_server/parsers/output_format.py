"""How the output of one request is parsed: `OutputFormat`, with the request's plan for reasoning.

A chat request can switch reasoning on or off, limit it by a token budget, and hide it. This file
turns that into variables of the chat template, a rule for the engine and a parser. The plan for
tool calls is made in `tool_calls.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from api_server.metrics.metrics import Metrics
from api_server.parsers.output import PLAIN_TEXT, ChoiceParser, OutputParser
from api_server.parsers.reasoning import (
    NO_REASONING,
    OutputStart,
    ReasoningFormat,
    ReasoningTokenCounter,
    TokenCounter,
)
from api_server.parsers.tool_calls import TEXT_ONLY, ToolCallPlan
from api_server.protocol.chat import REASONING_SWITCHES, Effort
from api_server.protocol.fields import IgnoredFields
from api_server.text.chat_template import Conversation, TemplateFacts
from api_server.text.detokenizer import Detokenizer
from api_server.text.tokenizer import ModelTokenizer
from proto.errors import InvalidRequestError
from proto.messages.sampling_params import ThinkingRule


@dataclass(frozen=True, slots=True)
class ReasoningPlan:
    """How the reasoning of one request is parsed and limited.

    rule: for the engine; None if the engine need not know. markers: token id → text of markers
    that are special tokens, which would have no text otherwise. is_shown: the response contains
    the reasoning.
    """

    format: ReasoningFormat = NO_REASONING
    output_start: OutputStart = OutputStart.CONTENT
    rule: ThinkingRule | None = None
    markers: Mapping[int, str] = field(default_factory=dict)
    is_shown: bool = True


WITHOUT_REASONING: Final = ReasoningPlan()


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How the choices of one request are parsed: reasoning first, then tool calls.

    Derived from it: `api_server/parsers/harmony.py:HarmonyOutput`, for models with channels.
    """

    tool_calls: ToolCallPlan = TEXT_ONLY
    reasoning: ReasoningPlan = WITHOUT_REASONING

    @property
    def has_tools(self) -> bool:
        """The answer may call tools."""
        return self.tool_calls.format is not None

    @property
    def markers(self) -> dict[int, str]:
        """Token id → text of the special tokens that the parsers must see."""
        return {**self.tool_calls.markers, **self.reasoning.markers}

    def new_parser(self) -> OutputParser:
        return self._after_reasoning(self.tool_calls.new_parser())

    def new_reasoning_parser(self) -> OutputParser:
        """Return a parser that separates reasoning alone; calls of tools stay in its content."""
        return self._after_reasoning(PLAIN_TEXT)

    def _after_reasoning(self, content_parser: OutputParser) -> OutputParser:
        """Return a parser for one choice; `content_parser` receives what is not reasoning."""
        plan, calls = self.reasoning, self.tool_calls.in_reasoning
        return plan.format.new_parser(
            plan.output_start, content_parser, is_shown=plan.is_shown, calls=calls
        )

    def new_counter(self, detokenizer: Detokenizer) -> TokenCounter | None:
        """Return the detokenizer with a count of reasoning tokens; None without reasoning."""
        plan, calls = self.reasoning, self.tool_calls.in_reasoning
        if plan.output_start is OutputStart.CONTENT:
            return None
        tokens = calls.tokens if calls else ()
        return ReasoningTokenCounter(detokenizer, plan.format, plan.output_start, tokens)

    def new_choice_parser(self, metrics: Metrics) -> ChoiceParser:
        """Return a parser for one choice of the response, counted if the request has tools."""
        return ChoiceParser(
            self.new_reasoning_parser(),
            metrics if self.has_tools else None,
            self.tool_calls.new_parser(),
        )


_NEAREST_EFFORTS: Final[Mapping[str, Sequence[str]]] = {
    "minimal": ("minimal", "low"),
    "xhigh": ("xhigh", "max", "high"),
    "max": ("max", "xhigh", "high"),
}
"""Effort → efforts nearest to it. The model was not trained with a word that its template does not
mention."""


def reasoning_variables(
    effort: Effort | None,
    facts: TemplateFacts,
    reasoning_format: ReasoningFormat,
    ignored: IgnoredFields,
) -> Mapping[str, Any]:
    """Return the chat template's variables for a `reasoning_effort`.

    A template that reads `reasoning_effort` receives it, or the nearest effort that it knows. Other
    templates can only switch reasoning on or off; if one cannot, the effort is added to `ignored`.
    Raises InvalidRequestError for `none` if the model reasons all the same.
    """
    if effort is None:
        return {}
    if "reasoning_effort" in facts.names:
        known = {"low", "medium", "high", "none", *facts.efforts}
        nearest = next(name for name in _NEAREST_EFFORTS.get(effort, (effort,)) if name in known)
        return {"reasoning_effort": nearest}
    switches: dict[str, Any] = {
        name: effort != "none" for name in REASONING_SWITCHES if name in facts.names
    }
    if not switches and effort != "none":
        ignored.add("reasoning_effort")
    elif not switches and reasoning_format.has_reasoning:
        raise InvalidRequestError(
            "reasoning_effort: the model's chat template cannot switch reasoning off",
            "reasoning_effort",
        )
    return switches


async def plan_reasoning(
    reasoning_format: ReasoningFormat,
    tokenizer: ModelTokenizer,
    conversation: Conversation,
    prompt: str,
    *,
    budget: int | None,
    has_grammar: bool,
    is_shown: bool,
) -> ReasoningPlan:
    """Return how the reasoning of one request is parsed and limited.

    prompt: the rendered conversation. budget: most reasoning tokens, None for no limit. Raises
    InvalidRequestError for a budget if the model has no reasoning.
    """
    if not reasoning_format.has_reasoning:
        if budget is not None:
            raise InvalidRequestError(
                "no reasoning format is known for this model: see --reasoning-parser",
                "thinking_token_budget",
            )
        return WITHOUT_REASONING
    start, end = reasoning_format.start, reasoning_format.end
    output_start = reasoning_format.output_start(prompt, _continued_text(conversation))
    encoded = tokenizer.encode([start, end], add_special_tokens=False)
    start_ids, end_ids = [ids async for ids in encoded]
    special = tokenizer.special_ids
    markers = {
        ids[0]: text
        for ids, text in ((start_ids, start), (end_ids, end))
        if len(ids) == 1 and ids[0] in special
    }
    for text in (reasoning_format.answer_start, reasoning_format.answer_end):
        token_id = tokenizer.special_id(text)
        if token_id is not None:
            markers[token_id] = text
    rule = None
    if output_start is not OutputStart.CONTENT and (budget is not None or has_grammar):
        rule = ThinkingRule(
            begun=output_start is OutputStart.REASONING,
            start=start,
            end=end,
            end_token_ids=tuple(end_ids),
            start_token_id=start_ids[0] if len(start_ids) == 1 else None,
            budget=budget,
        )
    return ReasoningPlan(reasoning_format, output_start, rule, markers, is_shown)


def _continued_text(conversation: Conversation) -> str:
    """Return the text of the last message if the output continues it, else ""."""
    if not conversation.continue_final_message:
        return ""
    content = conversation.messages[-1].get("content", "")
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)
