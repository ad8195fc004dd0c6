"""Parsers of tool calls, one family of formats a module."""
