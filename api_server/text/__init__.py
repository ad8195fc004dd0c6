"""Text in and out: tokenizer, chat templates, detokenizer, stop strings."""
