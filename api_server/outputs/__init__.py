"""What becomes of tokens: text, stop strings, log-probabilities, streams."""
