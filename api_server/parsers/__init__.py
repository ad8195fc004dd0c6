"""What a model's text means: reasoning, tool calls, plain content."""
