"""Scheduling policies: in which order requests are admitted and preempted."""
