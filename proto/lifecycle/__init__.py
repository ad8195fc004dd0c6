"""How processes start, find each other and end.

supervisor ──ProcessBoot (inherited descriptor)──▶ every process
worker ──WorkerReady──▶ engine ──InitializeCache──▶ worker ──CacheReady──▶ engine
engine ──EngineReady──▶ front ends and supervisor
front end ──FrontEndReady──▶ supervisor
any process ──Progress, Fatal──▶ supervisor ──Shutdown──▶ any process
engine, front end ──Distrust──▶ supervisor, which ends whom it names

When one of them dies the others go on, and hear from the supervisor whom to meet now:

engine died      supervisor ──NewEngine──▶ workers, front ends
worker died      supervisor ──NewWorkers──▶ engine ──WorkersReady──▶ supervisor
front end died   supervisor ──NewFrontEnd──▶ engine
front end stuck  engine ──FrontEndStalled──▶ supervisor, which kills it

Whether they still move is asked, because who hangs tells nothing:

supervisor ──Ping──▶ engine, front ends ──EngineAlive, Alive──▶ supervisor ──Condition──▶ front ends

A reload brings another engine and other workers, beside those of now or in their place:

supervisor ──NextEngine──▶ front ends ──NextReady──▶ supervisor ──SwitchEngine──▶ front ends
front ends ──Switched, EngineLeft──▶ supervisor ──Shutdown──▶ the old engine, its workers

Before the end the daemon drains:

supervisor ──Drain──▶ front ends ──UnderWay──▶ supervisor ──Shutdown──▶ any process

Links of the data path are numbered by epochs, all from one counter of the supervisor:
those between engine and workers by the worker epoch, those between engine and front
ends by the engine's own. A new engine has a new number for both.
"""

from proto.lifecycle.health import (
    Alive,
    Condition,
    Distrust,
    EngineAlive,
    FrontEndStalled,
    Heartbeat,
    NotReady,
    Ping,
)
from proto.lifecycle.news import (
    AbortRequests,
    Drain,
    DrainWanted,
    Fatal,
    NewEngine,
    NewFrontEnd,
    NewWorkers,
    Notice,
    Paused,
    Progress,
    Restarted,
    Shutdown,
    UnderWay,
    WorkersReady,
)
from proto.lifecycle.reload import (
    DropEngine,
    EngineLeft,
    NextEngine,
    NextReady,
    ReloadState,
    Switched,
    SwitchEngine,
)
from proto.lifecycle.roles import Role, process_name, process_title
from proto.lifecycle.start import (
    CacheReady,
    EngineReady,
    FrontEndReady,
    InitializeCache,
    KVCacheGeometry,
    KVGroup,
    Phase,
    ProcessBoot,
    ProcessStart,
    WeightMemory,
    WorkerReady,
)

__all__ = [
    "AbortRequests",
    "Alive",
    "CacheReady",
    "Condition",
    "Distrust",
    "Drain",
    "DrainWanted",
    "DropEngine",
    "EngineAlive",
    "EngineLeft",
    "EngineReady",
    "Fatal",
    "FromSupervisor",
    "FrontEndReady",
    "FrontEndStalled",
    "Heartbeat",
    "InitializeCache",
    "KVCacheGeometry",
    "KVGroup",
    "NewEngine",
    "NewFrontEnd",
    "NewWorkers",
    "NextEngine",
    "NextReady",
    "NotReady",
    "Notice",
    "Paused",
    "Phase",
    "Ping",
    "ProcessBoot",
    "ProcessStart",
    "Progress",
    "ReloadState",
    "Restarted",
    "Role",
    "Shutdown",
    "SwitchEngine",
    "Switched",
    "ToSupervisor",
    "UnderWay",
    "WeightMemory",
    "WorkerReady",
    "WorkersReady",
    "process_name",
    "process_title",
]

ToSupervisor = (
    EngineReady
    | FrontEndReady
    | Progress
    | Notice
    | Fatal
    | Heartbeat
    | WorkersReady
    | Paused
    | Alive
    | EngineAlive
    | FrontEndStalled
    | Distrust
    | UnderWay
    | DrainWanted
    | AbortRequests
    | NextReady
    | Switched
    | EngineLeft
)


FromSupervisor = (
    Shutdown
    | NewEngine
    | NewWorkers
    | NewFrontEnd
    | Paused
    | Restarted
    | Ping
    | Condition
    | AbortRequests
    | Drain
    | NextEngine
    | SwitchEngine
    | DropEngine
)
