"""Grammars: compiled off the loop of the engine, and what of the vocabulary they allow."""
