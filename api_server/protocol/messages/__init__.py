"""Anthropic's Messages API, translated into a chat completion and back."""
