"""The requests of the HTTP APIs: models of their bodies, translations into a chat completion."""
