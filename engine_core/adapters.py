"""Adapters (LoRA) by name: which content each name has, calls to change that, loads in workers.

    AdapterCall(load) ─▶ LoadAdapter ─▶ AdapterLoaded of all ranks ─▶ a name with a content
                                                                   ─▶ AdapterList, AdapterReply

A content has an id, which steps name, and the digest by which another engine knows it. Names of
equal content share one. A name that is loaded in place gets another content; requests that were
accepted before keep theirs, and it goes with the last of them. Which contents the workers hold
decides `engine_core/scheduler/features/adapters.py`.

The supervisor gets the list of names after each change, and an engine that comes later starts with
it. So names survive engines and reloads of the model. The workers of a new epoch hold nothing; what
requests need is loaded again.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from engine_core.scheduler.request_lifecycle import OutputsByFrontEnd
from engine_core.scheduler.scheduler import Scheduler
from engine_core.transport import FrontEndLinks
from engine_core.worker_group import WorkerGroup
from proto.errors import ConfigError, ErrorInfo, InvalidRequestError, UnknownModelError, shown
from proto.messages.lifecycle import Notice
from proto.messages.lora import (
    AdapterCall,
    AdapterCard,
    AdapterList,
    AdapterLoaded,
    AdapterReply,
    LoRARequest,
)
from proto.messages.view import ADAPTER_LOADING, ADAPTER_NOT_RESIDENT, ADAPTER_RESIDENT, AdapterView
from proto.runtime.sockets import Link
from proto.settings.lora_modules import LoRAModule

logger = logging.getLogger("tokend.adapters")

MAX_CRASHES: Final = 3
"""Crashes of workers while they load an adapter after which it is not tried again."""
CALL_SECONDS: Final = 300.0
"""Time after which a load is given up, because its disk may be gone."""
MAX_SHOWN: Final = 64
"""Adapters in a live view: those of requests first, then resident ones."""
_NOT_READ: Final = ErrorInfo(
    "internal", f"the adapter could not be read within {CALL_SECONDS:g} s", "model"
)
_NO_FRONT_END: Final = -1
"""In place of the front end of a call: this process itself, or one that has died."""


@dataclass(slots=True)
class _Content:
    """The content of an adapter. digest: empty until workers have loaded it for the first time.

    num_bytes: in the memory of all workers. num_crashes: of workers that loaded it, since the last
    time that they could. names: those that it has, in the order in which it got them.
    changes_images: as in AdapterLoaded.
    """

    lora_int_id: int
    path: str
    digest: bytes = b""
    changes_images: bool = False
    rank: int = 0
    num_bytes: int = 0
    num_crashes: int = 0
    names: dict[str, None] = field(default_factory=dict)


@dataclass(slots=True)
class _Name:
    """A name that requests can have. number, default_scale: as in AdapterCard."""

    content: _Content
    path: str
    number: int
    default_scale: float = 0.0


@dataclass(slots=True)
class _OpenCall:
    """A load that was asked for. content: being loaded. since: when that began."""

    front_end: int
    message: AdapterCall
    content: _Content | None = None
    since: float = 0.0


class AdapterRegistry:
    """The adapters of an engine. adapters: of an earlier engine.

    Front ends' calls to load are carried out one after the other. clock: seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        workers: WorkerGroup,
        front_ends: FrontEndLinks,
        supervisor: Link,
        epoch: int,
        adapters: Sequence[AdapterCard] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert scheduler.adapters is not None
        self._scheduler = scheduler
        self._gate, self._residency = scheduler.adapters, scheduler.adapters.residency
        self._workers = workers
        self._front_ends = front_ends
        self._supervisor = supervisor
        self._epoch = epoch
        self._clock = clock
        self._names: dict[str, _Name] = {}
        self._contents: dict[int, _Content] = {}
        self._by_digest: dict[bytes, _Content] = {}
        self._last_id = self._last_number = 0
        self._calls: deque[_OpenCall] = deque()
        self._began_at: dict[int, float] = {}  # loads under way; workers do one after the other
        self._error = ""  # of a load at the start
        self._default = ""  # the name of which requests without one have the adapter
        self.adopt_names(adapters)

    # Requests

    def find(self, lora: LoRARequest, *, accepted: bool) -> LoRARequest:
        """Return the adapter of a request with this engine's id of it.

        A request that was accepted before keeps its content; another one has what its name has now.
        Raises UnknownModelError for a name that was unloaded, InvalidRequestError for an adapter
        that crashes workers.
        """
        if accepted:
            content = self._by_digest.get(lora.digest)
            if content is None:
                content = self._known_content(lora)
                self._residency.unnamed.add(content.lora_int_id)
            content = self._with_usable_id(content)
        else:
            name = self._names.get(lora.lora_name)
            if name is None:
                raise UnknownModelError(
                    f"the model {shown(lora.lora_name)} does not exist: it was unloaded", "model"
                )
            content = self._with_usable_id(name.content)
        if content.num_crashes >= MAX_CRASHES:
            raise InvalidRequestError(_crash_error(content).message, "model")
        return self._request(content, lora.lora_name, content.path, lora.scale)

    # Calls

    def begin_call(self, front_end: int, message: AdapterCall) -> None:
        """Carry out a call, or queue it; the reply is sent when it is known."""
        name = self._names.get(message.lora_name)
        if message.action == "load":
            self._calls.append(_OpenCall(front_end, message))
            self._begin_next_load()
            return
        status, text = 200, ""
        if message.action == "default":
            if message.lora_name and name is None:
                status, text = 404, _not_found(message.lora_name)
            else:
                changed = [each for each in (self._default, message.lora_name) if each]
                for each in changed:
                    if each in self._names:
                        self._names[each].default_scale = 0.0
                if name is not None:
                    name.default_scale = message.scale
                self._default = message.lora_name
                self._announce(*changed)
        elif name is None and not message.resent:
            status, text = 404, _not_found(message.lora_name)
        else:
            if name is not None:
                del self._names[message.lora_name]
                del name.content.names[message.lora_name]
                self._gate.num_corrupted.pop(message.lora_name, None)
                self._forget_if_unnamed(name.content)
                self._announce(message.lora_name)
                logger.info("adapter %s is unloaded", message.lora_name)
            text = f"Success: LoRA adapter '{message.lora_name}' removed successfully."
        self._reply(front_end, message, status, text)

    def forget_front_end(self, front_end: int) -> None:
        """Send no reply to a front end that has died; its calls are carried out."""
        for call in self._calls:
            if call.front_end == front_end:
                call.front_end = _NO_FRONT_END

    def load_modules(self, modules: Sequence[LoRAModule], receive: Callable[[], bool]) -> None:
        """Load adapters at the start, one after the other.

        receive: waits for messages of the workers, and returns whether to go on.
        Raises ConfigError for the first one that cannot be loaded.
        """
        for module in modules:
            message = AdapterCall(self._epoch, 0, "load", module.name, module.path)
            self.begin_call(_NO_FRONT_END, message)
            while self._calls:
                self.exchange()
                if self._calls and not receive():
                    return
            if self._error:
                raise ConfigError(f"--lora-modules {module.name}: {self._error}")

    def adopt_names(self, cards: Sequence[AdapterCard]) -> None:
        """Take over the names of another engine, in place of all present ones."""
        old = {id(name.content): name.content for name in self._names.values()}
        self._names.clear()
        self._default = ""
        for replaced in old.values():
            replaced.names.clear()
        for card in cards:
            content = self._by_digest.get(card.lora.digest)
            if content is None:
                content = self._known_content(card.lora)
                content.rank, content.num_bytes = card.rank, card.num_bytes
            self._residency.unnamed.discard(content.lora_int_id)
            self._last_number = max(self._last_number, card.number + 1)
            name = card.lora.lora_name
            self._names[name] = _Name(content, card.lora.path, card.number, card.default_scale)
            content.names[name] = None
            if card.default_scale:
                self._default = name
        for content in old.values():
            self._forget_if_unnamed(content)

    def announce_adopted(self) -> None:
        """Send the list of names to the front ends, but not to the supervisor, which has it."""
        cards = [self._card(name) for name in self._names]
        self._front_ends.send_adapters(AdapterList(self._epoch, cards))

    # Workers

    def exchange(self) -> OutputsByFrontEnd:
        """Process what workers have loaded, and have them load and drop adapters.

        Returns the final outputs of requests whose adapter could not be loaded.
        """
        outputs: OutputsByFrontEnd = {}
        for answers in self._workers.pop_loaded_adapters():
            self._end_load(answers, outputs)
        if (self._began_at or self._calls) and self.seconds_to_next_end == 0.0:
            self._end_overdue(outputs)
        for name in self._gate.pop_newly_corrupted():
            notice = f"adapter {name}: the logits of a request contain NaN or infinity"
            self._supervisor.send(Notice(notice, is_warning=True))
        if self._workers.is_ready:
            for lora_int_id, is_load in self._residency.pop_commands():
                if is_load:
                    content = self._contents[lora_int_id]
                    self._began_at[lora_int_id] = self._clock()
                    self._workers.load_adapter(lora_int_id, content.path, content.digest)
                else:
                    self._end_time_of(lora_int_id)
                    self._workers.drop_adapter(lora_int_id)
        return outputs

    def lose_workers(self) -> None:
        """Note that the workers died; call it before the scheduler begins another worker epoch."""
        for lora_int_id in self._began_at:
            content = self._contents.get(lora_int_id)
            if content is not None:
                content.num_crashes += 1
        self._began_at.clear()

    def begin_worker_epoch(self) -> OutputsByFrontEnd:
        """Have the workers of a new epoch load what the open call asks for.

        Returns the final outputs of requests whose adapter has crashed the workers too often.
        """
        errors: dict[int, ErrorInfo] = {}
        for request in self._scheduler.requests:
            if request.lora_request is not None:
                content = self._contents[request.lora_request.lora_int_id]
                if content.num_crashes >= MAX_CRASHES:
                    errors[request.seq_id] = _crash_error(content)
        if self._calls and (content_of_call := self._calls[0].content) is not None:
            if content_of_call.num_crashes >= MAX_CRASHES:
                self._end_call(_crash_error(content_of_call))
            else:
                self._residency.load_now(content_of_call.lora_int_id)
        return self._scheduler.fail_requests(errors) if errors else {}

    @property
    def seconds_to_next_end(self) -> float | None:
        """Time until a load is given up; None without one."""
        since = list(self._began_at.values())[:1]
        call = self._waiting_call()
        if call is not None:
            since.append(call.since)
        return max(0.0, min(since) + CALL_SECONDS - self._clock()) if since else None

    def views(self) -> list[AdapterView]:
        """Return the resident ones and those of requests for the live view, the latter first."""
        residency, gate = self._residency, self._gate
        views = []
        for lora_int_id in {*residency.resident, *residency.loading, *gate.num_unfinished}:
            state = ADAPTER_NOT_RESIDENT
            if lora_int_id in residency.resident:
                state = ADAPTER_RESIDENT
            elif lora_int_id in residency.loading:
                state = ADAPTER_LOADING
            num_unfinished = gate.num_unfinished.get(lora_int_id, 0)
            num_running, content = gate.num_running(lora_int_id), self._contents[lora_int_id]
            views += [
                AdapterView(name, state, num_running, num_unfinished, content.num_bytes)
                for name in content.names
            ]
        views.sort(key=lambda view: (-view.num_unfinished, view.state, view.name))
        return views[:MAX_SHOWN]

    # Internals

    def _begin_next_load(self) -> None:
        """Begin with the first call that waits; refuse those whose name is taken."""
        while self._calls and self._calls[0].content is None:
            call = self._calls[0]
            message, name = call.message, self._names.get(call.message.lora_name)
            if name is not None and message.resent and name.path == message.path:
                self._calls.popleft()
                self._reply(call.front_end, message, 200, _added(message.lora_name))
            elif name is not None and not message.load_inplace:
                self._calls.popleft()
                self._reply(
                    call.front_end,
                    message,
                    400,
                    f"The lora adapter '{message.lora_name}' has already been loaded. If you want "
                    "to load the adapter in place, set 'load_inplace' to True.",
                )
            else:
                call.content = self._new_content(message.path)
                call.since = self._clock()
                self._residency.load_now(call.content.lora_int_id)

    def _end_overdue(self, outputs: OutputsByFrontEnd) -> None:
        """Give up a load that takes too long; end the requests and the call that wait for it."""
        latest = self._clock() - CALL_SECONDS
        lora_int_id = next(iter(self._began_at), None)
        if lora_int_id is not None and self._began_at[lora_int_id] <= latest:
            self._end_time_of(lora_int_id)
            errors = {
                request.seq_id: _NOT_READ
                for request in self._scheduler.requests
                if request.lora_request is not None
                and request.lora_request.lora_int_id == lora_int_id
            }
            logger.warning("adapter %d: %s", lora_int_id, _NOT_READ.message)
            self._residency.forget(lora_int_id)
            _add_outputs(outputs, self._scheduler.fail_requests(errors))
        call = self._waiting_call()
        if call is not None and call.since <= latest:
            assert call.content is not None
            self._residency.forget(call.content.lora_int_id)
            self._end_call(_NOT_READ)

    def _waiting_call(self) -> _OpenCall | None:
        """Return the first call if its load has not been sent to the workers, or is given up."""
        if not self._calls or (content := self._calls[0].content) is None:
            return None
        return None if content.lora_int_id in self._began_at else self._calls[0]

    def _end_time_of(self, lora_int_id: int) -> float:
        """Return the seconds that a load took, 0.0 if there is none; the next one begins now."""
        now, first = self._clock(), next(iter(self._began_at), None)
        seconds = now - self._began_at.pop(lora_int_id, now)
        if lora_int_id == first and self._began_at:
            self._began_at[next(iter(self._began_at))] = now
        return seconds

    def _end_load(self, answers: Sequence[AdapterLoaded], outputs: OutputsByFrontEnd) -> None:
        """Process the answers of all ranks to a load."""
        lora_int_id = answers[0].lora_int_id
        content = self._contents[lora_int_id]
        seconds = self._end_time_of(lora_int_id)
        error = _error_of(answers, content)
        if error is None:
            content.rank = max(answer.lora_rank for answer in answers)
            content.num_bytes = sum(answer.num_bytes for answer in answers)
            content.changes_images = any(answer.changes_images for answer in answers)
            content.num_crashes = 0
        else:
            logger.warning("adapter %d, %s: %s", lora_int_id, content.path, error.message)
        waiting = self._gate.end_load(lora_int_id, succeeded=error is None, seconds=seconds)
        if error is not None and waiting:
            errors = {request.seq_id: error for request in waiting}
            _add_outputs(outputs, self._scheduler.fail_requests(errors))
        if self._calls and self._calls[0].content is content:
            self._end_call(error, answers)

    def _end_call(self, error: ErrorInfo | None, answers: Sequence[AdapterLoaded] = ()) -> None:
        """Reply to the first call, whose load has ended, and begin with the next."""
        call = self._calls.popleft()
        message, content = call.message, call.content
        assert content is not None
        name, text = message.lora_name, _added(message.lora_name)
        self._error = ""
        if error is None:
            digest = answers[0].digest
            known = self._by_digest.get(digest)
            if known is None:
                self._set_digest(content, digest)
            else:  # the same content under another name
                self._drop_content(content, answers)
                content = self._with_usable_id(known)
            self._set_name(name, content, message.path)
            if not any(answer.effect for answer in answers):
                text += " Its effect on a probe is exactly zero: it changes nothing."
                notice = f"adapter {name} has no effect: on a probe it is exactly zero"
                self._supervisor.send(Notice(notice))
            self._announce(name)
            logger.info("adapter %s is loaded from %s", name, message.path)
            self._reply(call.front_end, message, 200, text)
        else:
            self._error = error.message
            self._drop_content(content, answers)
            status = 400 if error.kind == "invalid_request" else 500
            self._reply(call.front_end, message, status, error.message)
        self._begin_next_load()

    def _set_name(self, name: str, content: _Content, path: str) -> None:
        old = self._names.get(name)
        if old is None:
            self._names[name] = _Name(content, path, self._last_number)
            self._last_number += 1
        else:
            replaced, old.content, old.path = old.content, content, path
            del replaced.names[name]
            self._gate.num_corrupted.pop(name, None)
            self._forget_if_unnamed(replaced)
        content.names[name] = None
        self._residency.unnamed.discard(content.lora_int_id)

    def _new_content(self, path: str, lora_int_id: int = 0) -> _Content:
        """Return a new content, with this id unless it may have been used before."""
        self._last_id = lora_int_id = max(self._last_id + 1, lora_int_id)
        content = self._contents[lora_int_id] = _Content(lora_int_id, path)
        return content

    def _known_content(self, lora: LoRARequest) -> _Content:
        """Return a new content for one that another engine has loaded."""
        content = self._new_content(lora.path, lora.lora_int_id)
        content.changes_images = lora.changes_images
        self._set_digest(content, lora.digest)
        return content

    def _with_usable_id(self, content: _Content) -> _Content:
        """Return a content, in place of one whose id must not be loaded again."""
        if content.lora_int_id not in self._residency.retired:
            return content
        other = self._new_content(content.path)
        other.rank, other.num_bytes = content.rank, content.num_bytes
        other.changes_images = content.changes_images
        self._set_digest(other, content.digest)
        other.names, content.names = content.names, {}
        for name in other.names:
            self._names[name].content = other
        if not other.names:
            self._residency.unnamed.add(other.lora_int_id)
        return other

    def _set_digest(self, content: _Content, digest: bytes) -> None:
        content.digest = digest
        self._by_digest[digest] = content

    def _drop_content(self, content: _Content, answers: Sequence[AdapterLoaded]) -> None:
        """Forget a content that gets no name; without answers workers may still load it."""
        self._residency.forget(content.lora_int_id)
        if answers:
            del self._contents[content.lora_int_id]

    def _forget_if_unnamed(self, content: _Content) -> None:
        """Free a content without a name, now or with its last request.

        It stays known by its digest: a name may get it again.
        """
        if content.names:
            content.path = self._names[next(iter(content.names))].path
        elif content.lora_int_id in self._gate.num_unfinished:
            self._residency.unnamed.add(content.lora_int_id)
        else:
            self._residency.forget(content.lora_int_id)

    def _card(self, name: str) -> AdapterCard:
        each = self._names[name]
        return AdapterCard(
            self._request(each.content, name, each.path),
            each.content.rank,
            each.content.num_bytes,
            each.number,
            each.default_scale,
        )

    def _request(self, content: _Content, name: str, path: str, scale: float = 1.0) -> LoRARequest:
        return LoRARequest(
            content.lora_int_id, name, path, content.digest, scale, content.changes_images
        )

    def _announce(self, *names: str) -> None:
        """Send what these names are now to the supervisor, and to front ends before the reply."""
        adapters = AdapterList(
            self._epoch,
            [self._card(name) for name in names if name in self._names],
            is_change=True,
            removed=[name for name in names if name not in self._names],
        )
        self._supervisor.send(adapters)
        self._front_ends.send_adapters(adapters)

    def _reply(self, front_end: int, message: AdapterCall, status: int, text: str) -> None:
        self._error = "" if status == 200 else text
        if front_end != _NO_FRONT_END:
            reply = AdapterReply(self._epoch, message.call_id, status, text)
            self._front_ends.send(front_end, reply)


def _add_outputs(outputs: OutputsByFrontEnd, more: OutputsByFrontEnd) -> None:
    for front_end, ended in more.items():
        outputs.setdefault(front_end, []).extend(ended)


def _added(name: str) -> str:
    return f"Success: LoRA adapter '{name}' added successfully."


def _not_found(name: str) -> str:
    return f"The lora adapter '{name}' cannot be found."


def _error_of(answers: Sequence[AdapterLoaded], content: _Content) -> ErrorInfo | None:
    """Return why an adapter cannot be used; None if all ranks have loaded the same content."""
    for answer in answers:
        if answer.error is not None:
            return answer.error
    digests = {answer.digest for answer in answers}
    if len(digests) > 1 or not all(digests):
        return ErrorInfo("internal", "the workers have read different adapters")
    if content.digest and content.digest not in digests:
        return ErrorInfo(
            "invalid_request",
            "the files of the adapter are not those that it was loaded from: load it again",
            "model",
        )
    return None


def _crash_error(content: _Content) -> ErrorInfo:
    return ErrorInfo(
        "internal",
        f"the workers died {content.num_crashes} times while they loaded this adapter; it is not "
        "tried again",
        "model",
    )
