"""Which tokens the text of a message is made of, where their log-probabilities were asked for.

    tokens    <think> │ Hm │ . │ </think> │ \\n\\n │ Let │ _me │ <eos>
    parts               Reasoning                    Content
    told                                         Let   _me   <eos>

Owns the tokens until it is known what their text is. Parsers read text and know nothing of
tokens, so they are given the text of one token after the other; what they then call content is
the end of what they have read, or nearly, and whatever stands before it is told of nowhere.
"""

from collections import deque
from collections.abc import Iterator

from api_server.outputs.choice import Delta
from api_server.outputs.logprobs import TextToken


class TokensOfText:
    """Of one choice, whose first character has the offset 0."""

    def __init__(self) -> None:
        self._waiting: deque[TextToken] = deque()  # whose text the parser has not read
        self._read: list[TextToken] = []  # whose text it has, and has not said what it is
        self._unsaid: list[str] = []  # what it has read since the last content
        self._num_read = 0

    def pieces(self, delta: Delta) -> Iterator[str]:
        """The text of a delta, cut where tokens begin; all of it where it has no tokens."""
        self._waiting += delta.tokens
        start, end = self._num_read, self._num_read + len(delta.text)
        while True:
            while self._waiting and self._waiting[0].text_offset <= self._num_read:
                self._read.append(self._waiting.popleft())
            if self._num_read == end:
                return
            cut = min(self._waiting[0].text_offset, end) if self._waiting else end
            piece = delta.text[self._num_read - start : cut - start]
            self._num_read = cut
            if self._read:
                self._unsaid.append(piece)
            yield piece

    def of_content(self, text: str) -> list[TextToken]:
        """Those of a text that the parser has found in what it has read.

        unsaid    </think>  \\n\\n  Let  <to        tokens before the text belong to no text;
                                   └───┘          the last may hold what comes next as well
        """
        unsaid = "".join(self._unsaid)
        place = max(unsaid.rfind(text), 0)
        self._unsaid = [unsaid[place + len(text) :]]
        begins = self._num_read - len(unsaid) + place
        ends = begins + len(text)
        found = [each for each in self._read if each.text_offset < ends]
        while len(found) > 1 and found[1].text_offset <= begins:
            found.pop(0)
        self._read = [each for each in self._read if each.text_offset >= ends]
        return found

    def rest(self) -> list[TextToken]:
        """Those behind the last content, as the one that ended the choice."""
        found, self._read, self._unsaid = self._read, [], []
        return found
