"""Anthropic's Messages API: requests, translated into a chat completion."""
