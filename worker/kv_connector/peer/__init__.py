"""KV handed from daemon to daemon, workers' half. Start with connector.py."""
