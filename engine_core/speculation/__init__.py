"""Drafts of tokens to come: where they come from, and how many are worth verifying."""
