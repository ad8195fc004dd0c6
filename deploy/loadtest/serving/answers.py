"""Whether a server answers the same request the same way again.

Owns the first answer to each checked request; requests are the same when their bytes are.
"""

import hashlib
import json
from dataclasses import dataclass, field

from deploy.loadtest.openai.client import Ask


@dataclass
class Answers:
    """Of one server. num_compared: answers that another one was known of. different: in words."""

    num_compared: int = 0
    different: list[str] = field(default_factory=list)
    _known: dict[bytes, str] = field(default_factory=dict)

    def note(self, ask: Ask, text: str) -> None:
        """A whole answer to a checked request."""
        body = json.dumps([ask.path, ask.content, ask.output_tokens], sort_keys=True).encode()
        key = hashlib.sha256(body).digest()
        if key not in self._known:
            self._known[key] = text
            return
        known = self._known[key]
        self.num_compared += 1
        if known != text:
            place = next(
                (i for i, (a, b) in enumerate(zip(known, text, strict=False)) if a != b),
                min(len(known), len(text)),
            )
            self.different.append(
                f"after {place} characters: {known[place:][:40]!r}, then {text[place:][:40]!r}"
            )
