"""What a reload goes through, phase by phase.

                         ┌ side by side ─ it starts, front ends meet it ─ switch ─▶ leaving: the
    preparing ─▶ meeting ┤                                               old one's requests end
    (the model           └ in place ─ front ends read the model ─▶ clearing: the old one ends
     once more)                    ─▶ starting: front ends send it what is open ─ switch

Each phase says which one follows. Until the switch nothing is lost when something fails: the
old generation goes on, or in place is started again. Processes are reached by `Hands` only.
"""

import textwrap
from typing import Final

from deploy import obituary
from deploy.births import Births
from deploy.ending import AFTER_A_DEATH, ON_REQUEST, Ending, Patience
from deploy.obituary import Deceased
from deploy.reload_surface import Idle, Member, Phase, Surface
from proto.codec import Message
from proto.errors import ModelError
from proto.lifecycle import (
    DropEngine,
    EngineLeft,
    EngineReady,
    NewEngine,
    NextEngine,
    NextReady,
    Paused,
    ProtocolViolation,
    Switched,
    SwitchEngine,
)
from proto.prepared_model import PreparedModel

MEETING_SECONDS: Final = 600.0
"""For another generation to load and to be met by every front end."""


class Preparing(Phase):
    """The files of the model may have changed."""

    def __init__(self, on: Surface) -> None:
        super().__init__(on)
        self._preparation = on.hands.prepare()

    def press(self) -> Phase:
        if not self._preparation.has_ended():
            return self
        try:
            model = self._preparation.result()
        except ModelError as error:
            return self.give_up(str(error))
        self._on.hands.let_go(self._preparation)
        return Waiting(self._on, model).press()

    def give_up(self, why: str) -> Phase:
        self._on.hands.let_go(self._preparation)
        self._on.conclude(why, False)
        return Idle(self._on)


class Waiting(Phase):
    """Nobody is to be missing when another generation comes."""

    def __init__(self, on: Surface, model: PreparedModel) -> None:
        super().__init__(on)
        self._model = model

    def press(self) -> Phase:
        if self._on.recovery.has_gaps:
            return self
        return Meeting(self._on, self._model, in_place=not self._side_by_side()).begin()

    def _side_by_side(self) -> bool:
        """Not beside a frozen engine, which would never finish what it has."""
        if self._on.births.pause_mode == "freeze":
            return False
        strategy = self._on.strategy
        return strategy == "side-by-side" or (strategy == "auto" and self._on.hands.fits())

    def give_up(self, why: str) -> Phase:
        self._on.conclude(why, False)
        return Idle(self._on)


class Meeting(Phase):
    """Front ends get ready for another generation; side by side that one starts meanwhile."""

    def __init__(self, on: Surface, model: PreparedModel, *, in_place: bool) -> None:
        super().__init__(on)
        self._in_place = in_place
        self._births = on.births.sibling(model)
        self._missing = set(range(on.num_front_ends))
        self._deadline = on.clock() + MEETING_SECONDS

    def begin(self) -> Phase:
        births = self._births
        try:
            if not self._in_place:
                self._on.start(births)
        except OSError as error:
            return self.give_up(f"no process could be started: {error.strerror}")
        self._on.hands.tell_front_ends(NextEngine(births.epoch, births.model, self._in_place))
        return self

    def press(self) -> Phase:
        if not self._missing and not self._on.recovery.has_gaps:
            return self._switch()
        if self._on.clock() < self._deadline:
            return self
        return self.give_up(f"it was not ready after {MEETING_SECONDS:g} s")

    def seconds_left(self) -> float | None:
        return max(0.0, self._deadline - self._on.clock())

    def note(self, message: Message) -> Phase:
        if _is_distrust(message, self._births):
            return self.give_up("one of its processes is not to be trusted")
        if isinstance(message, Paused) and message.mode != self._births.pause_mode:
            # who is born knows of another pause, or of none
            return self._stop("the engine was paused or resumed meanwhile", again=True)
        if not isinstance(message, NextReady) or message.epoch != self._births.epoch:
            return self
        if message.error is not None:
            return self.give_up(obituary.user_error(message.error) or message.error.message)
        self._missing.discard(message.index)
        return self

    def owns(self, dead: Member) -> bool:
        return dead.role != "api_server" and dead.generation == self._births.generation

    def note_death(self, dead: Member) -> Phase:
        if self.owns(dead):
            return self.give_up(told(dead))
        return self._stop(f"{dead.name} died meanwhile", again=True)

    def give_up(self, why: str) -> Phase:
        return self._stop(why, again=False)

    def _stop(self, why: str, *, again: bool) -> Phase:
        self._on.hands.tell_front_ends(DropEngine(self._births.epoch))
        self._on.conclude(why, again)
        return Parting(self._on, self._births, AFTER_A_DEATH)

    def _switch(self) -> Phase:
        births, hands = self._on.births, self._on.hands
        old = births.as_it_is()
        births.adopt(self._births)
        if self._in_place:
            hands.tell_front_ends(NewEngine(births.epoch, births.worker_epoch, died=False))
            return Clearing(self._on, old, restores=False)
        hands.tell_front_ends(SwitchEngine(births.epoch))
        return Leaving(self._on, old)


class Leaving(Phase):
    """The old generation computes what it has begun, beside the one of now.

    The reload is over as soon as every front end asks the new one.
    """

    def __init__(self, on: Surface, old: Births) -> None:
        super().__init__(on)
        self._old = old
        self._epoch = on.births.epoch
        self._switching = set(range(on.num_front_ends))
        self._missing = set(self._switching)

    def note(self, message: Message) -> Phase:
        if isinstance(message, Switched) and message.epoch == self._epoch:
            self._switched(message.index)
        elif isinstance(message, EngineLeft) and message.epoch == self._old.epoch:
            return self._left(message.index)
        elif _is_distrust(message, self._old):
            return self._abandon()
        elif isinstance(message, Paused):
            _pause_all(self._on, self._old, message)
        return self

    def owns(self, dead: Member) -> bool:
        return dead.role != "api_server" and dead.generation == self._old.generation

    def cut_off(self, hung: Member) -> Phase:
        return self._abandon() if self.owns(hung) else self

    def note_death(self, dead: Member) -> Phase:
        """With a front end go its requests."""
        if self.owns(dead):
            return self._abandon()
        return self._left(dead.index) if dead.role == "api_server" else self

    def _abandon(self) -> Phase:
        """The old generation is of no use any more: its requests go on at the engine of now."""
        self._on.hands.tell_front_ends(DropEngine(self._old.epoch))
        for index in list(self._switching):
            self._switched(index)  # it will have, before it hears of that
        return Parting(self._on, self._old, AFTER_A_DEATH)

    def _switched(self, index: int) -> None:
        if index in self._switching:
            self._switching.remove(index)
            if not self._switching:
                self._on.conclude("", False)

    def _left(self, index: int) -> Phase:
        self._switched(index)
        self._missing.discard(index)
        return self if self._missing else Parting(self._on, self._old, ON_REQUEST)


class Parting(Phase):
    """A generation that nobody asks any more ends."""

    def __init__(self, on: Surface, births: Births, patience: Patience) -> None:
        super().__init__(on)
        self._births = births
        self._ending = Ending(on.hands.members(births.generation), patience, on.clock)

    def press(self) -> Phase:
        self._ending.press()
        if self._on.hands.members(self._births.generation):
            return self
        self._births.remove_sockets(self._births.epoch)
        self._births.remove_sockets(self._births.worker_epoch)
        return self._after()

    def note(self, message: Message) -> Phase:
        if isinstance(message, Paused):
            _pause_all(self._on, self._births, message)
        return self

    def seconds_left(self) -> float | None:
        return self._ending.seconds_to_next_step()

    def owns(self, dead: Member) -> bool:
        return dead.role != "api_server" and dead.generation == self._births.generation

    def is_ending(self, process: Member) -> bool:
        return self.owns(process)

    def _after(self) -> Phase:
        return Idle(self._on)


class Clearing(Parting):
    """In place: what was makes room; meanwhile requests wait in the front ends.

    restores: what comes is what was there before.
    """

    def __init__(self, on: Surface, old: Births, *, restores: bool) -> None:
        super().__init__(on, old, ON_REQUEST)
        self._restores = restores

    def _after(self) -> Phase:
        self._on.start(self._on.births)
        return Idle(self._on) if self._restores else Starting(self._on, self._births.model)


class Starting(Phase):
    """In place: the new generation loads. If it cannot, that of `model` comes back."""

    def __init__(self, on: Surface, model: PreparedModel) -> None:
        super().__init__(on)
        self._model = model

    def note(self, message: Message) -> Phase:
        births = self._on.births
        if not isinstance(message, EngineReady) or message.epoch != births.epoch:
            return self
        self._on.hands.tell_front_ends(SwitchEngine(births.epoch))
        self._on.conclude("", False)
        return Idle(self._on)

    def owns(self, dead: Member) -> bool:
        return dead.role != "api_server" and dead.generation == self._on.births.generation

    def note_death(self, dead: Member) -> Phase:
        if not self.owns(dead):
            return self
        births, hands = self._on.births, self._on.hands
        failed = births.as_it_is()
        self._on.conclude(told(dead), False)
        hands.tell_front_ends(DropEngine(failed.epoch))
        births.adopt(births.sibling(self._model))
        hands.tell_front_ends(NewEngine(births.epoch, births.worker_epoch, died=False))
        return Clearing(self._on, failed, restores=True)


def _pause_all(on: Surface, beside: Births, message: Paused) -> None:
    """Who pauses the daemon means all that is computed, whichever engine was asked.

    That was the one of before where a front end had not switched yet, or where its word was
    still on its way here when the others did:

        operator ─▶ front end ─▶ engine 1 ─ Paused ──────────────┐
        supervisor ──── SwitchEngine(2) ─────────────────────────┴─▶ engine 2 hears of it now

    Each engine hears all of it in the order in which it was heard here, so they end up alike.
    """
    on.births.pause_mode = message.mode
    for generation in (beside.generation, on.births.generation):
        for each in on.hands.members(generation):
            if each.role == "engine_core":
                each.tell(message)


def _is_distrust(message: Message, births: Births) -> bool:
    """Somebody has said what it cannot mean, and belongs to these."""
    if not isinstance(message, ProtocolViolation):
        return False
    return message.epoch == (births.worker_epoch if message.role == "worker" else births.epoch)


def told(dead: Deceased) -> str:
    """What the user should know of a process that could not start."""
    message = obituary.user_error(dead.last_words)
    if message is not None:
        return message
    lines = [f"{dead.name} (pid {dead.pid}) {obituary.manner(dead)}"]
    if dead.last_words is not None:
        lines.append(textwrap.indent(dead.last_words.traceback.rstrip(), "  "))
    return "\n".join(lines)
