"""What processes share when they run: sockets, start and end, run directory, Redis, logs."""
