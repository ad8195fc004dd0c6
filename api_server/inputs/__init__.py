"""What becomes of a client's words: templates, tokens, sampling parameters."""
