"""Drafts of tokens to come: who guesses them, and how many are worth verifying."""
