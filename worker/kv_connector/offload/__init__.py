"""Offloading of KV blocks, workers' half. Start with connector.py."""
