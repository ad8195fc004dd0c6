"""Drafts by a model beside the served one, in the same worker. Start at drafter.py."""
