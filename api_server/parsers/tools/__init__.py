"""The formats of tool calls: parser, grammar and rendering of each."""
