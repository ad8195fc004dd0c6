"""Profiles of the running daemon: the messages between engine and workers.

    POST /start_profile   engine ── ProfileCall(start) ──▶ workers: torch's profiler records steps
                          engine and front ends sample the stacks of their main threads
    POST /stop_profile    engine ── ProfileCall(stop) ──▶ workers write a trace each
                          engine and front ends write their stacks

A profile that no call ends is discarded with its process.
"""

from typing import Literal

import msgspec

ProfileAction = Literal["start", "stop", "discard"]


class ProfileCall(msgspec.Struct, array_like=True, tag=30, frozen=True):
    """Engine → worker: begin a profile, write it, or drop it.

    number: of the call, in the order of their sending. Exactly one ProfileReply follows.
    """

    epoch: int
    number: int
    action: ProfileAction


class ProfileReply(msgspec.Struct, array_like=True, tag=31, frozen=True):
    """Worker → engine. path: of the trace that was written. error: why the call failed, or ""."""

    epoch: int
    rank: int
    number: int
    path: str = ""
    error: str = ""
