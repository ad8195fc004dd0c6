"""How models write the calls of tools: parsers of their text, and grammars of what parsers read."""
