"""Parsers of a model's output: reasoning, tool calls and content."""
