"""OpenAI's Responses API: requests, translated into a chat completion."""
