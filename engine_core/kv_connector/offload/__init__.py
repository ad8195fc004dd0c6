"""Offloading of KV blocks, scheduler's half. Start with connector.py."""
