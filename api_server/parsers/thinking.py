"""What a chat request asks of the model's thoughts: a switch, a budget, whether they are shown.

Owns how these become variables of the template, a rule for the engine and the way the answer is
read. Which model thinks, and between which markers, says its style.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from api_server.parsers.parts import PartsParser
from api_server.parsers.reasoning import (
    NO_REASONING,
    CountingDetokenizer,
    Opening,
    ReasoningParser,
    ReasoningStyle,
    opening_of,
)
from api_server.protocol.chat import Effort
from api_server.text.chat_template import Conversation, TemplateFacts
from api_server.text.detokenizer import Detokenizer
from api_server.text.tokenizer import ModelTokenizer
from proto.errors import InvalidRequestError
from proto.sampling_params import ThinkingRule

_SWITCHES: Final[tuple[str, ...]] = ("enable_thinking", "thinking")
"""Variables by which templates have a model think or not."""


@dataclass(frozen=True, slots=True)
class Thoughts:
    """Of one request.

    rule: for the engine; None where it need not know. markers: tokens that have no text
    otherwise. shows: the client is to see the thoughts.
    """

    style: ReasoningStyle = NO_REASONING
    opening: Opening = Opening.OUTSIDE
    rule: ThinkingRule | None = None
    markers: dict[int, str] = field(default_factory=dict)
    shows: bool = True

    def parser(self, rest: PartsParser) -> PartsParser:
        """For the text of one choice; `rest` reads what is no thought."""
        if self.opening is Opening.OUTSIDE:
            return rest
        return ReasoningParser(self.style, self.opening, rest, shows=self.shows)

    def counting(self, detokenizer: Detokenizer) -> list[CountingDetokenizer]:
        """The same detokenizer with a count of the thoughts, if there may be any."""
        if self.opening is Opening.OUTSIDE:
            return []
        return [CountingDetokenizer(detokenizer, self.style, self.opening)]


NO_THOUGHTS: Final = Thoughts()


def switches(
    effort: Effort | None, facts: TemplateFacts, style: ReasoningStyle
) -> Mapping[str, Any]:
    """Variables for the template; raises InvalidRequestError where it has no use for an effort.

    A template that reads `reasoning_effort` gets it. In any other one, reasoning can only be
    switched on or off; a model without reasoning needs no variable for off.
    """
    if effort is None:
        return {}
    if "reasoning_effort" in facts.names:
        return {"reasoning_effort": effort}
    known = {name: effort != "none" for name in _SWITCHES if name in facts.names}
    if not known and not (effort == "none" and not style.thinks):
        raise InvalidRequestError(
            "the model's chat template knows neither efforts nor a switch for thinking",
            "reasoning_effort",
        )
    return known


async def thoughts_of(
    style: ReasoningStyle,
    tokenizer: ModelTokenizer,
    conversation: Conversation,
    prompt: str,
    *,
    budget: int | None,
    has_grammar: bool,
    shows: bool,
) -> Thoughts:
    """prompt: the conversation as the template wrote it.

    Raises InvalidRequestError for a budget of a model that has no thoughts.
    """
    if not style.thinks:
        if budget is not None:
            raise InvalidRequestError(
                "the model has no thoughts that are known here: see --reasoning-parser",
                "thinking_token_budget",
            )
        return NO_THOUGHTS
    opening = opening_of(style, prompt, _continued(conversation))
    start_ids, end_ids = await tokenizer.encode([style.start, style.end], add_special_tokens=False)
    known = ((start_ids, style.start), (end_ids, style.end))
    special = tokenizer.special_ids
    markers = {ids[0]: text for ids, text in known if len(ids) == 1 and ids[0] in special}
    rule = None
    if opening is not Opening.OUTSIDE and (budget is not None or has_grammar):
        rule = ThinkingRule(
            begun=opening is Opening.INSIDE,
            start=style.start,
            end=style.end,
            end_token_ids=tuple(end_ids),
            start_token_id=start_ids[0] if len(start_ids) == 1 else None,
            budget=budget,
        )
    return Thoughts(style, opening, rule, markers, shows)


def _continued(conversation: Conversation) -> str:
    """The text that the answer goes on with; empty for a new message."""
    if not conversation.continue_final_message:
        return ""
    content = conversation.messages[-1].get("content", "")
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)
