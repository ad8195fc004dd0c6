"""Anthropic's Messages API: requests and answers, translated to and from those of chat."""
