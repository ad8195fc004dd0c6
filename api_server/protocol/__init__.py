"""The HTTP APIs: request models, translations into a chat completion, and response encoders."""
