"""The scheduler's trace (`--sched-trace`); its lines are in `proto/messages/sched_trace.py`."""
