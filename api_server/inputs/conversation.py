"""What a chat template is given.

Owns nothing: messages and tools are as the client sent them, checked elsewhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Conversation:
    """The values of a template's variables.

    tools: JSON schemas of functions; documents: to answer from; None where there are none.
    add_generation_prompt: end with what an answer begins with.
    continue_final_message: end in the middle of the last message, which the answer goes on with.
    variables: more of them, by name, which win over those of the model.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
