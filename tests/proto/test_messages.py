"""Every message decodes to what was encoded."""

import msgspec
import pytest

from proto.codec import MessageDecoder, encode, from_json, to_json
from proto.errors import ErrorInfo, ProtocolError
from proto.messages import engine_io, lifecycle, lora, peer_io, view
from proto.messages.engine_io import (
    Abort,
    AdminCall,
    AdminReply,
    AgentHint,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    LogprobsArrays,
    RequestProgress,
    SessionInput,
    ToEngine,
    TurnEnded,
)
from proto.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from proto.messages.lifecycle import (
    AbortRequests,
    Alive,
    CacheReady,
    Drain,
    DrainProgress,
    DrainRequested,
    DropEngine,
    EngineAlive,
    EngineReady,
    Fatal,
    ForgetImages,
    FromSupervisor,
    FrontEndReady,
    FrontEndStalled,
    HealthStatus,
    Heartbeat,
    InitializeCache,
    KVCacheGeometry,
    KVGroup,
    NewEngine,
    NewFrontEnd,
    NewWorkers,
    NextEngine,
    NextReady,
    Notice,
    NotReady,
    OldEngineIdle,
    Paused,
    Ping,
    Prepared,
    ProcessBoot,
    ProcessStart,
    ProfileFrontEnds,
    Progress,
    ProtocolViolation,
    Restarted,
    Shutdown,
    StartPhase,
    Switched,
    SwitchEngine,
    TakePlace,
    ToSupervisor,
    WaitingForRanks,
    WeightFormatMemory,
    WorkerReady,
    WorkersReady,
)
from proto.messages.logit_edits import LogitEdits
from proto.messages.lora import (
    AdapterCall,
    AdapterCard,
    AdapterList,
    AdapterLoaded,
    AdapterReply,
    AdapterUsage,
    DropAdapter,
    LoadAdapter,
    LoRARequest,
)
from proto.messages.model_runner_output import ModelRunnerOutput, RowLogprobs
from proto.messages.peer_io import PeerCall, PeerReply
from proto.messages.prepared_model import PreparedModel, TensorEntry, TensorIndex
from proto.messages.sampling_params import RepetitionDetection, SamplingParams
from proto.messages.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from proto.messages.stats import KVEviction, SchedulerStats
from proto.messages.view import BlockMap, EngineView, RequestView, Watch
from proto.runtime.faults import Fault
from proto.settings.config import ServeConfig
from tests.fakes import lifecycle_messages
from tests.fakes.events import first_events

PARAMS = SamplingParams(
    max_tokens=16,
    min_tokens=2,
    temperature=0.7,
    top_k=5,
    top_p=0.9,
    min_p=0.1,
    stop_token_ids=(4, 5),
    eos_token_ids=(2,),
    ignore_eos=True,
    logprobs=3,
    prompt_logprobs=0,
    beam_width=2,
    length_penalty=0.5,
    early_stopping="never",
    edits=LogitEdits(
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        bias_token_ids=(1, 2),
        bias_values=(-100.0, 0.5),
        bad_words=((1,), (2, 3)),
        allowed_token_ids=(4, 5),
    ),
    logprob_token_ids=(7,),
    repetition=RepetitionDetection(max_pattern_size=3, min_pattern_size=2, min_count=4),
)
ARRAYS = LogprobsArrays(4, 2, b"\x00\x01", b"\xff", b"")
ERROR = ErrorInfo("internal", "it broke", "n", 1, "Traceback …")
MODEL = PreparedModel(
    folder="/models/x",
    name="x",
    source="/models/x.gguf",
    architecture="LlamaForCausalLM",
    vocab_size=10,
    max_position=128,
    bos_token_id=1,
    eos_token_ids=(2, 3),
    weights_sample="ab" * 32,
    has_chat_template=True,
)
NEW = NewRequestData(
    seq_id=(1 << 32) - 1,
    prompt_token_ids=[1, 2, 3],
    output_token_ids=[4],
    sampling_params=PARAMS,
    seed=(1 << 64) - 1,
    choice=2,
    block_ids=[[1, 2], [3]],
    num_computed_tokens=2,
    num_scheduled_tokens=1,
    extra_key=(1 << 64) - 1,
)
CACHED = CachedRequestData([1, 2], [5, 0], [1, 7], [None, [[3], [4, 5]]], [2], [[8, 9]], [1], [17])
LORA = LoRARequest(7, "a", "/a", bytes(32), 0.5)
MESSAGES = [
    EngineCoreRequest(
        epoch=1,
        request_id=(1 << 63) - 1,
        prompt_token_ids=[1, 2],
        sampling_params=PARAMS,
        seed=(1 << 64) - 1,
        arrival_time=12.5,
        n=2,
        priority=-3,
        cache_salt="sält",
        output_token_ids=((1,), ()),
        finished_choices=(1,),
        crash_count=1,
        resumable=True,
        tenant=(1 << 64) - 1,
        accepted=True,
        queue_deadline=13.5,
        deadline=14.5,
        agent=AgentHint("job", True, 2.5),
        label="cmpl-1",
        reader=(1 << 64) - 1,
    ),
    SessionInput(1, 2, [3, 4], PARAMS, True),
    TurnEnded(1, 2, "job", "weather"),
    Watch(1, True),
    PeerCall(1, "conversation", 2**64 - 1, "ann", ("resp_1_a",)),
    PeerReply(1, (b"[]",)),
    PeerReply(1, None),
    EngineView(
        1,
        12.5,
        0.25,
        *range(2, 10),
        [RequestView(1, (1 << 64) - 1, "cmpl-1", 3, 20, 5, 24, 16, 2)],
        4,
        BlockMap(b"\1\0\0\0", b"\5", b"\0\0\0\0"),
        5,
        20,
        14,
        24,
        3,
    ),
    Abort(1, 2, "stop_string", 0),
    AdminCall(1, 2, "pause", "freeze", True),
    AdminReply(1, 2, False, "because", 3),
    EngineCoreOutputs(
        1,
        2,
        3.5,
        [
            EngineCoreOutput(
                7, 1, 3, [4, 5], FinishReason.STOP, 5, first_events(16, 1.0, 2.0, 8), ARRAYS, ARRAYS
            ),
            EngineCoreOutput(8, 0, 0, [], FinishReason.ERROR, error=ERROR),
            EngineCoreOutput(9, 0, 2, [6], FinishReason.LENGTH, goes_on=True),
            EngineCoreOutput(10, 0, 2, [6, 7, 8], num_accepted_drafts=2),
        ],
        [7],
        SchedulerStats(1, 2, 0.5, 3, 4, 5, 6, [KVEviction(2.5, 1.5, [0.5])], 7, 8, 9, 10),
        [9],
        [RequestProgress(9, 16, 32)],
    ),
    SchedulerOutput(
        epoch=1,
        step=2,
        new_requests=[NEW],
        cached_requests=CACHED,
        total_num_scheduled_tokens=9,
        finished_seq_ids=[5],
        preempted_seq_ids=[6],
        block_copies=[3, 4, 5, 6],
    ),
    ModelRunnerOutput(
        1,
        2,
        [1, 2],
        [[3], []],
        [RowLogprobs(1, ARRAYS)],
        [RowLogprobs(2, ARRAYS)],
        0.25,
        ERROR,
        [2],
        [RowLogprobs(1, ARRAYS)],
    ),
    ProcessBoot(
        protocol_version=1,
        role="worker",
        index=1,
        incarnation=2,
        epoch=3,
        worker_epoch=4,
        run_dir="/run/x",
        death_fd=4,
        config=ServeConfig(),
        model=MODEL,
        listen_fds=(7,),
        front_ends=(2, 0),
        pause_mode="freeze",
        faults=(Fault("worker", 1, "kill", 20, 2),),
        generation=3,
        born_at=12.5,
    ),
    WorkerReady(
        1,
        2,
        0,
        KVCacheGeometry(30, 3, 64, "float32", 46080, (KVGroup(), KVGroup(512))),
        1 << 32,
        49152,
        b"f" * 32,
        "cpu",
        (WeightFormatMemory("packed", 96_000_000),),
        (StartPhase("imports", 0.75),),
    ),
    InitializeCache(1, 2, 100, 16, 2048),
    CacheReady(1, 0),
    EngineReady(
        1,
        2,
        2048,
        99,
        16,
        49152,
        "cpu",
        100,
        1000,
        1 << 32,
        weights=(WeightFormatMemory("packed", 1 << 26),),
        starts=(ProcessStart("worker", 0, (StartPhase("imports", 0.75),)),),
    ),
    FrontEndReady(1, (StartPhase("imports", 0.75),)),
    Prepared(),
    TakePlace(lifecycle_messages.boot("worker")),
    Progress("loading", 0.5),
    Notice("careful"),
    Fatal("worker", 1, ERROR),
    Shutdown(),
    NewEngine(3, 4, False),
    NewWorkers(5),
    NewFrontEnd(1, 2),
    Restarted("worker"),
    Heartbeat(3, 100),
    FrontEndStalled(1, 2),
    WorkersReady(3),
    Paused("freeze"),
    Ping(),
    Alive(),
    EngineAlive(3, 100, (0, 2), True, True, 4, True),
    HealthStatus((NotReady("engine 0 is being restarted", 12.5),), 1, 2),
    ProtocolViolation("worker", 1, 3, "it babbles"),
    WaitingForRanks(1),
    Drain(),
    DrainProgress(1, 7),
    DrainRequested(1),
    ProfileFrontEnds(True),
    ForgetImages(),
    AbortRequests(["cmpl-1"], "alice"),
    NextEngine(5, MODEL, True),
    NextReady(1, 5, ERROR),
    SwitchEngine(5),
    Switched(1, 5),
    OldEngineIdle(1, 3),
    DropEngine(3),
    AdapterCall(3, 1, "load", "a", "/a", True, 0.5, True),
    AdapterReply(3, 1, 404, "no adapter"),
    AdapterList(3, [AdapterCard(LORA, 8, 1 << 20, 2, 0.5)], is_change=True, removed=["b"]),
    AdapterUsage(3, ["a"], ["b"], 4, {"a": 5}),
    LoadAdapter(3, 7, "/a", bytes(32)),
    AdapterLoaded(3, 1, 7, bytes(32), 8, 1 << 20, 0.25, ERROR),
    DropAdapter(3, 7),
    KVEventBatch(
        3.5,
        [
            BlockStored([2**64 - 1], None, [1, 2], 2, None, "GPU", None, [["salt"]], 0, "full"),
            BlockStored([5], 2**64 - 1, [3, 4], 2, None, "CPU", None),
            BlockRemoved([5, 6], "GPU", 1),
            AllBlocksCleared(),
        ],
    ),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: type(each).__name__)
def test_round_trip(message):
    assert MessageDecoder(type(message)).decode(encode(message)) == message


def test_every_tagged_message_has_a_round_trip_test():
    modules = (engine_io, lifecycle, lora, peer_io, view)
    tagged = {
        each
        for module in modules
        for each in vars(module).values()
        if isinstance(each, type)
        and issubclass(each, msgspec.Struct)
        and each.__struct_config__.tag is not None
    }
    assert tagged <= {type(each) for each in MESSAGES}
    assert len(tagged) >= 14


@pytest.mark.parametrize(
    "union", [ToEngine, ToSupervisor, FromSupervisor, InitializeCache | SchedulerOutput]
)
def test_a_union_decodes_only_its_own_messages(union):
    decoder = MessageDecoder(union)
    for message in MESSAGES:
        if type(message).__struct_config__.tag is None:
            continue
        if isinstance(message, union):
            assert decoder.decode(encode(message)) == message
        else:
            with pytest.raises(ProtocolError):
                decoder.decode(encode(message))


def test_fields_may_be_appended_later():
    """A message of a newer process with one more field still decodes."""
    message = Abort(1, 2, "disconnect", None)
    fields = [*msgspec.msgpack.decode(encode(message)), "new"]
    assert MessageDecoder(ToEngine).decode(msgspec.msgpack.encode(fields)) == message


def test_manifest_survives_json():
    assert from_json(to_json(MODEL), PreparedModel) == MODEL
    with pytest.raises(ProtocolError, match="vocab_size"):
        from_json(to_json(MODEL).replace(b'"vocab_size": 10', b'"vocab_size": "x"'), PreparedModel)


def test_tensor_index():
    index = TensorIndex("gguf", ("/a",), (TensorEntry("w", "Q4_1", (2, 3), 0, 64, 10),))
    assert MessageDecoder(TensorIndex).decode(encode(index)) == index
