"""The scheduler's trace: what `--sched-trace` writes. Its lines are in `proto/sched_trace.py`."""
