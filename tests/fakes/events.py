"""Events of choices, as the engine sends them with outputs."""

from proto.messages.engine_io import EngineCoreEvent, EngineCoreOutput, EventType


def first_events(
    num_cached: int, queued: float, scheduled: float, num_external: int = 0
) -> tuple[EngineCoreEvent, ...]:
    """Return what comes with the first output of a choice that was never preempted."""
    return (
        EngineCoreEvent(EventType.QUEUED, queued),
        EngineCoreEvent(EventType.SCHEDULED, scheduled, num_cached, num_external),
    )


def event_types(output: EngineCoreOutput) -> list[EventType]:
    return [event.type for event in output.events]


def num_cached_tokens(output: EngineCoreOutput) -> int | None:
    """Return the cached tokens of the choice, if it was scheduled since its last output."""
    found = [event for event in output.events if event.type is EventType.SCHEDULED]
    return found[0].num_cached_tokens if found else None
