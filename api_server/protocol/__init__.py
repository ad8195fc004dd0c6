"""The OpenAI wire format: request models and response builders. Knows no engine."""
