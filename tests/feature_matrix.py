"""Which features go together: the data of the table in docs/configuration.md, and what writes it.

    python -m tests.feature_matrix

An entry stands for each pair of two groups of features. Tests are named by their path below tests/.
tests/deploy/test_feature_matrix.py checks that each pair has one entry, that the tests exist, and
that the messages of refusals come from the code.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from api_server.generation.app_state import AppState
from api_server.generation.request_builder import check_beams, check_grammar
from api_server.protocol.completions import CompletionRequest
from api_server.routes.sessions import _check_available
from deploy import flags
from engine_core.validation import RequestLimits, validate_request
from proto.messages.engine_io import EngineCoreRequest
from proto.messages.sampling_params import SamplingParams

PAGE: Final = Path(__file__).parents[1] / "docs" / "configuration.md"
BEGIN: Final = "<!-- Written by python -m tests.feature_matrix -->\n"
END: Final = "<!-- End of the features -->\n"

FEATURES: Final = {
    "drafts": "drafts from text (n-gram, suffix, grammar)",
    "draft_model": "draft model or head",
    "adapters": "adapters (LoRA)",
    "ranks": "tensor and expert parallelism",
    "replicas": "several engines (`--data-parallel-size`)",
    "standby_engines": "`--standby-engines`",
    "standby_workers": "`--standby-workers`",
    "host_kv": "KV in host memory",
    "stored_kv": "KV on a disk, in Redis, in a folder",
    "peer_kv": "prefill and decode in two daemons",
    "kv_events": "KV events",
    "kv_8_bits": "int8 and fp8 KV",
    "states": "recurrent states",
    "transformers": "models on transformers' code",
    "cpu": "`--device cpu` or `reference`",
    "cuda": "`--device cuda`",
    "invariant": "`--batch-invariant`",
    "cascade": "cascade attention",
    "async": "`--async-scheduling`",
    "reload": "reload side by side",
    "priority": "priorities",
    "agents": "agent sessions that retain KV",
    "sessions": "sessions (input in parts)",
    "grammar": "structured output",
    "beams": "beam search",
    "choices": "`n` choices",
    "prompt_logprobs": "`prompt_logprobs`",
    "prompt_embeds": "`prompt_embeds`",
    "experts": "`return_routed_experts`",
    "images": "images",
    "pooling": "pooling models",
    "encoders": "encoders",
}
"""The name of each feature in the table, by its name here, in the order of the table."""


@dataclass(frozen=True)
class Works:
    """test: shows it. why: the reason why a test of one pair shows it for others, too."""

    test: str
    why: str = ""


@dataclass(frozen=True)
class Refused:
    """message: an example of what the user sees. test: shows the refusal.

    run: raises an error with the message; None where that needs a model: then a string of the test
    matches the message. part: what alone is refused; the rest works, which `rest` shows, a test.
    """

    message: str
    test: str
    run: Callable[[], Any] | None = None
    part: str = ""
    rest: str = ""


@dataclass(frozen=True)
class Meaningless:
    reason: str


Cell = Works | Refused | Meaningless


def serve(*words: str) -> None:
    """Validate the flags of a daemon. Raises ConfigError."""
    flags.build(flags.parse(words))


def body(**fields: Any) -> CompletionRequest:
    return CompletionRequest(prompt="a", **fields)


def in_session(name: str, value: object) -> Refused:
    """Return the refusal of a field in a session. value: of the field; not its default."""
    return Refused(
        f"{name} is not available in a session",
        "api_server/test_sessions.py"
        "::test_an_invalid_message_is_an_error_and_the_session_continues",
        partial(lambda fields: _check_available(body(**fields)), {name: value}),
    )


def validate(limits: RequestLimits, num_tokens: int = 1, **fields: Any) -> None:
    """Validate a request in the engine. Raises InvalidRequestError."""
    params = {name: fields.pop(name) for name in SamplingParams.__struct_fields__ if name in fields}
    validate_request(
        EngineCoreRequest(
            epoch=1,
            request_id=1,
            prompt_token_ids=[0] * num_tokens,
            sampling_params=SamplingParams(max_tokens=4, **params),
            seed=0,
            arrival_time=0.0,
            **{"n": 1, **fields},
        ),
        limits,
    )


OFFLOADING: Final = (
    "--kv-transfer-config",
    '{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": '
    '{"cpu_bytes_to_use": 1000000}}',
)
FOLDER: Final = (
    "--kv-transfer-config",
    '{"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": '
    '{"shared_storage_path": "/kv"}}',
)
EVENTS: Final = (
    "--kv-events-config",
    '{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}',
)

PEER: Final = "engine_core/scheduler/test_peer_connector.py"
PEER_WORKERS: Final = "worker/kv_connector/test_peer.py"
TWO_DAEMONS: Final = "e2e/test_prefill_decode.py::test_decode_goes_on_with_the_kv_of_prefill"
IMAGES: Final = "api_server/test_images.py::test_choices_grammars_streams_and_a_continued_answer"
IMAGES_WITH: Final = "worker/test_images_with_features.py"
LIVES: Final = (
    "engine_core/scheduler/test_lives.py::test_random_request_sequences_keep_the_invariants"
)
APART: Final = (
    "engine_core/scheduler/test_adapters.py"
    "::test_kv_is_apart_by_content_and_scale_and_shared_by_equal_contents"
)
BITS: Final = "worker/test_speculation.py::test_answers_are_those_without_drafts_bit_by_bit"
HEADS: Final = "worker/speculation/test_eagle.py::test_answers_are_those_without_a_head"
DEVICE_DRAFTS: Final = (
    "worker/speculation/test_device_drafts.py::test_the_model_itself_drafts_what_it_will_answer"
)
DRAFTS_OF_LOADS: Final = (
    "engine_core/speculation/test_drafting_in_the_scheduler.py"
    "::test_requests_with_loaded_kv_have_drafts"
)
NO_DRAFTS: Final = "engine_core/speculation/test_drafting.py::test_a_model_without_drafts_is_named"
DRAFT_SETTINGS: Final = (
    "worker/speculation/test_draft_settings.py::test_what_cannot_work_is_refused_by_name"
)
TWO_RANKS: Final = "worker/parallel/test_engine.py::test_two_ranks_give_the_results_of_one"
EMBEDS: Final = "worker/test_prompt_embeds.py::test_embeddings_give_what_their_tokens_give"
EMBEDS_ON_RANKS: Final = "worker/test_prompt_embeds.py::test_ranks_give_what_one_gives"
COPIES: Final = (
    "worker/kv_connector/test_offload_worker.py::test_stored_blocks_are_loaded_bit_by_bit"
)
ON_TRANSFORMERS: Final = (
    "worker/models/test_transformers_model.py"
    "::test_settings_that_an_unknown_architecture_cannot_have"
)
DRAFTS_ON_TRANSFORMERS: Final = (
    "e2e/test_transformers_code.py::test_drafts_logprobs_of_prompts_and_eight_bits"
)
BEAMS_WITH_LOADS: Final = "e2e/test_beams.py::test_beams_of_agents_whose_prompts_are_loaded"
NOT_INVARIANT: Final = (
    "worker/test_memory_plan.py::test_what_depends_on_the_batch_is_refused_where_bits_shall_not"
)
INVARIANT: Final = (
    "e2e/test_batch_invariance.py::test_greedy_outputs_do_not_depend_on_how_they_are_computed"
)
ENCODER_SETTINGS: Final = "worker/test_encoders.py::test_settings_that_an_encoder_cannot_have"
SIDE_BY_SIDE: Final = "e2e/test_reload.py::test_reload_side_by_side_keeps_streams"
ENGINES: Final = "e2e/test_engines.py::test_engines_give_equal_answers"
STANDBY: Final = "chaos/test_takeovers.py::test_streams_survive_deaths_beside_standby_processes"
STANDBY_FLAGS: Final = (
    "proto/test_config.py::test_standby_processes_that_could_replace_none_are_refused"
)
IMPORTS: Final = "architecture/test_imports.py::test_folder_imports_only_what_the_table_allows"

NO_DRAFT_MESSAGE: Final = "--speculative-config: no drafts for this model: "
UNCACHED: Final = (
    "BertModel attends in both directions: it keeps no KV cache, and computes each text in one step"
)
POOLED: Final = "The model does not support Completions API: it is served for pooling"

SCHEDULER_ALONE: Final = "the scheduler alone knows it, and plans the same steps for all workers"
ATTENTION_ALONE: Final = "attention alone knows it; rows, sampling and block ids are the same"
LOGITS_ALONE: Final = "it begins behind the logits, and does not see what computed them"

ENTRIES: Final[tuple[tuple[str, str, Cell], ...]] = (
    # ---- Drafts ----
    ("drafts", "draft_model", Works(HEADS)),
    (
        "drafts",
        "ranks",
        Works(
            "e2e/test_draft_model.py::test_two_workers",
            "drafts are verified alike, wherever they come from",
        ),
    ),
    (
        "drafts draft_model",
        "host_kv stored_kv peer_kv",
        Works(DRAFTS_OF_LOADS, "the scheduler does not know the medium of a connector"),
    ),
    (
        "drafts draft_model",
        "kv_events",
        Works(
            "engine_core/scheduler/test_speculative_decoding.py::test_drafts_are_never_findable",
            "events tell of findable blocks",
        ),
    ),
    ("drafts", "kv_8_bits invariant async choices prompt_logprobs experts", Works(BITS)),
    (
        "drafts",
        "prompt_embeds",
        Works(BITS, "any token may be proposed; a wrong one changes no answer"),
    ),
    (
        "drafts",
        "states",
        Works(BITS),
    ),
    (
        "drafts",
        "pooling encoders",
        Refused(f"{NO_DRAFT_MESSAGE}its outputs are pooled", NO_DRAFTS),
    ),
    ("drafts", "cpu", Works("e2e/test_speculation.py::test_answers_are_those_without_drafts")),
    (
        "drafts",
        "cuda",
        Works("worker/test_cuda_runner.py::test_drafts_are_verified_on_the_device"),
    ),
    (
        "drafts",
        "grammar",
        Works(
            "engine_core/structured_output/test_manager.py"
            "::test_constrained_answers_are_those_without_drafts"
        ),
    ),
    (
        "drafts draft_model",
        "beams",
        Works(
            "engine_core/scheduler/test_speculative_decoding.py"
            "::test_beams_and_pooled_requests_are_not_drafted_for",
            "the rows of a search are computed without drafts",
        ),
    ),
    ("drafts draft_model", "priority agents sessions", Works(LIVES)),
    ("drafts", "transformers", Works(DRAFTS_ON_TRANSFORMERS)),
    (
        "drafts",
        "cascade",
        Works("worker/test_cuda_runner.py::test_whole_steps_read_a_shared_prefix_once"),
    ),
    (
        "draft_model",
        "ranks",
        Refused(
            "--speculative-config: method draft_model drafts on one GPU only so far: "
            "--tensor-parallel-size 1 is needed, got 2",
            "worker/speculation/test_draft_settings.py::test_ranks_on_gpus_are_refused",
            part="on GPUs",
            rest="e2e/test_draft_model.py::test_two_workers",
        ),
    ),
    (
        "draft_model",
        "kv_8_bits",
        Works(
            "worker/speculation/test_draft_model.py::test_greedy_drafts_are_those_of_transformers"
        ),
    ),
    (
        "draft_model",
        "states",
        Refused(
            "--speculative-config: method draft_model: Qwen3NextForCausalLM has recurrent states, "
            "with which no model drafts",
            DRAFT_SETTINGS,
        ),
    ),
    (
        "draft_model",
        "pooling encoders",
        Refused("--speculative-config: no drafts for m: its outputs are pooled", DRAFT_SETTINGS),
    ),
    (
        "draft_model",
        "transformers",
        Refused(
            "--speculative-config: method eagle: GptOssForCausalLM runs on transformers' code, "
            "which has no heads",
            DRAFT_SETTINGS,
            part="a head",
            rest="worker/speculation/test_draft_model.py"
            "::test_answers_are_those_without_a_draft_model",
        ),
    ),
    (
        "draft_model",
        "cpu",
        Works("e2e/test_draft_model.py::test_answers_are_those_without_drafts"),
    ),
    ("draft_model", "cuda invariant grammar", Works(DEVICE_DRAFTS)),
    ("draft_model", "async prompt_logprobs", Works(HEADS)),
    (
        "draft_model",
        "choices",
        Works(
            "engine_core/scheduler/test_lookahead.py::test_answers_are_those_without_a_draft_model"
        ),
    ),
    (
        "draft_model",
        "cascade",
        Works(
            "worker/speculation/test_device_drafts.py"
            "::test_a_draft_model_reads_a_shared_prefix_once"
        ),
    ),
    (
        "draft_model",
        "prompt_embeds",
        Works("worker/speculation/test_draft_model.py::test_a_prompt_of_embeddings_has_drafts"),
    ),
    (
        "draft_model",
        "experts",
        Works(
            "worker/speculation/test_draft_model.py::test_answers_are_those_without_a_draft_model"
        ),
    ),
    # ---- Adapters ----
    (
        "adapters",
        "host_kv stored_kv peer_kv",
        Works(
            APART,
            "connectors name blocks by the hashes of the prefix cache",
        ),
    ),
    (
        "adapters",
        "kv_events",
        Works("engine_core/kv_cache/test_kv_events.py::test_events_name_the_adapter"),
    ),
    ("adapters", "async priority sessions choices prompt_logprobs", Works(LIVES)),
    (
        "adapters",
        "agents",
        Works(
            "engine_core/scheduler/test_adapters.py"
            "::test_a_turn_with_another_adapter_uses_no_retained_kv"
        ),
    ),
    (
        "adapters",
        "beams",
        Works("engine_core/scheduler/test_adapters.py::test_the_rows_of_a_search_have_its_adapter"),
    ),
    ("adapters", "grammar", Works(LIVES, LOGITS_ALONE)),
    (
        "adapters",
        "reload",
        Works("deploy/test_reload_adapters.py::test_a_new_engine_has_the_names"),
    ),
    (
        "adapters",
        "pooling",
        Works("worker/adapters/test_pooled.py::test_embeddings_of_a_decoder"),
    ),
    (
        "adapters",
        "encoders",
        Works("worker/adapters/test_pooled.py::test_embeddings_of_an_encoder"),
    ),
    (
        "drafts",
        "adapters",
        Works("worker/adapters/test_bases.py::test_drafts_are_verified_with_the_adapter"),
    ),
    (
        "draft_model",
        "adapters",
        Works("worker/adapters/test_bases.py::test_a_draft_model_proposes_without_the_adapter"),
    ),
    ("adapters", "ranks", Works("e2e/test_adapters.py::test_two_ranks")),
    (
        "adapters",
        "kv_8_bits",
        Works(
            "e2e/test_kv_dtypes.py::test_int8_kv_gives_the_same_text_cold_cached_and_preempted",
            ATTENTION_ALONE,
        ),
    ),
    (
        "adapters",
        "states",
        Works("worker/adapters/test_formats.py::test_logits_are_those_of_merged_weights"),
    ),
    (
        "adapters",
        "transformers",
        Refused(
            "tensor base_model.model.lm_head.lora_A.weight: embedding and head of a model on "
            "transformers' code have no adapters",
            "worker/adapters/test_transformers_code.py"
            "::test_what_is_not_supported_is_refused_by_name",
            part="DoRA, and adapters of embedding and head",
            rest="worker/adapters/test_transformers_code.py"
            "::test_greedy_tokens_are_those_of_merged_weights",
        ),
    ),
    ("adapters", "cpu", Works("e2e/test_adapters.py::test_tokens_of_merged_weights_and_deaths")),
    (
        "adapters",
        "cuda",
        Refused(
            "--lora-target-modules lm_head: on a GPU adapters change neither embedding nor head: "
            "--device cpu is needed",
            "worker/adapters/test_gpu_limits.py"
            "::test_modules_that_no_adapter_changes_on_a_gpu_are_refused",
            part="embedding, head, experts, kv_b_proj, and models on transformers' code",
            rest="worker/adapters/test_cuda_steps.py::test_tokens_are_those_of_the_reference",
        ),
    ),
    (
        "adapters",
        "invariant",
        Works(
            "worker/adapters/test_kernel_adapters.py::test_a_row_has_the_same_bits_in_every_batch"
        ),
    ),
    (
        "adapters",
        "cascade",
        Works(
            "worker/adapters/test_cuda_steps.py"
            "::test_steps_that_read_a_shared_prefix_once_have_adapters"
        ),
    ),
    (
        "adapters",
        "prompt_embeds",
        Works("worker/adapters/test_steps.py::test_prompts_of_embeddings_have_the_adapter"),
    ),
    (
        "adapters",
        "experts",
        Works("worker/adapters/test_bases.py::test_experts_are_those_that_the_adapter_leads_to"),
    ),
    # ---- Ranks ----
    (
        "ranks",
        "host_kv",
        Works("e2e/test_offloading.py::test_offloading_does_not_change_greedy_tokens"),
    ),
    ("ranks", "stored_kv", Works("e2e/test_kv_tiers.py::test_two_workers_share_a_disk")),
    ("ranks", "kv_events priority agents sessions", Works(TWO_RANKS, SCHEDULER_ALONE)),
    ("ranks", "beams choices", Works(TWO_RANKS)),
    ("ranks", "prompt_logprobs prompt_embeds", Works(EMBEDS_ON_RANKS)),
    ("ranks", "states", Works("worker/models/test_families.py::test_a_folder_on_two_ranks")),
    (
        "ranks",
        "transformers",
        Refused(
            "--tensor-parallel-size 2: OtherForCausalLM runs on transformers' code, which one "
            "worker computes",
            ON_TRANSFORMERS,
        ),
    ),
    (
        "ranks",
        "cpu async",
        Works(
            "e2e/test_tensor_parallel.py"
            "::test_concurrent_requests_with_preemptions_and_two_steps_in_flight"
        ),
    ),
    (
        "ranks",
        "cuda grammar",
        Works(
            "worker/parallel/test_cuda_ranks.py::test_two_ranks_replay_their_collectives_in_graphs"
        ),
    ),
    (
        "ranks",
        "invariant",
        Refused(
            "--batch-invariant: sums over GPUs depend on their size; --tensor-parallel-size 1 "
            "works",
            NOT_INVARIANT,
            part="on GPUs",
            rest="worker/parallel/test_engine.py"
            "::test_bits_of_two_ranks_do_not_depend_on_the_batch",
        ),
    ),
    (
        "ranks",
        "experts",
        Works(
            "e2e/test_routed_experts.py"
            "::test_experts_of_transformers_under_pressure_and_after_a_death"
        ),
    ),
    (
        "ranks",
        "pooling encoders",
        Works("worker/test_encoders.py::test_two_ranks_compute_the_embeddings_of_one"),
    ),
    ("ranks", "kv_8_bits", Works(TWO_RANKS)),
    (
        "ranks",
        "cascade",
        Works("worker/parallel/test_cuda_ranks.py::test_two_ranks_read_a_shared_prefix_once"),
    ),
    # ---- KV of connectors, and its events ----
    (
        "host_kv",
        "stored_kv",
        Works(
            "engine_core/kv_connector/test_multi_offload.py"
            "::test_a_restarted_request_waits_for_its_earlier_copies"
        ),
    ),
    (
        "host_kv",
        "kv_events",
        Works(
            "engine_core/kv_connector/test_offload_scheduling.py::test_take_events_have_their_medium"
        ),
    ),
    (
        "stored_kv",
        "kv_events",
        Works(
            "engine_core/kv_connector/test_disk_manager.py"
            "::test_take_events_reports_stored_and_removed_blocks"
        ),
    ),
    ("host_kv", "kv_8_bits", Works(COPIES)),
    (
        "stored_kv",
        "kv_8_bits",
        Works(
            "worker/kv_connector/test_shared_storage.py::test_blocks_come_back_as_they_were_stored"
        ),
    ),
    (
        "host_kv",
        "states",
        Works("e2e/test_state_tiers.py::test_turns_go_on_from_states_in_host_memory"),
    ),
    (
        "stored_kv",
        "states",
        Refused(
            "kv_transfer_config: SharedStorageConnector does not copy recurrent states",
            "worker/test_memory_plan.py"
            "::test_a_connector_without_states_is_refused_before_a_weight_is_read",
            part="a folder (`SharedStorageConnector`)",
            rest="e2e/test_state_tiers.py"
            "::test_a_restarted_daemon_answers_the_next_turn_from_its_disk",
        ),
    ),
    (
        "host_kv stored_kv peer_kv",
        "transformers invariant cascade",
        Works(COPIES, "blocks are copied as bytes, by code that does not read them"),
    ),
    (
        "host_kv",
        "cpu",
        Refused(
            "--preemption swap needs --device cuda: a CPU's KV is in host memory already, so a "
            "larger --kv-cache-memory does what swapping would, without copies",
            "proto/test_kv_media_checks.py::test_swap_on_a_cpu_is_refused",
            partial(serve, "--device", "cpu", "--preemption", "swap", *OFFLOADING),
            part="`--preemption swap`",
            rest="e2e/test_offloading.py::test_offloading_does_not_change_greedy_tokens",
        ),
    ),
    (
        "stored_kv",
        "cpu",
        Refused(
            "--cpu-weights packed+int8 does not go with SharedStorageConnector: the number of rows "
            "in a step selects one of two formats, whose KV differs; give auto, packed, int8, bf16 "
            "or f32",
            "proto/test_kv_media_checks.py::test_several_weight_formats_are_refused",
            partial(serve, "--cpu-weights", "packed+int8", *FOLDER),
            part="weights in two formats",
            rest="e2e/test_kv_tiers.py::test_a_restarted_daemon_loads_from_its_disk",
        ),
    ),
    (
        "host_kv stored_kv peer_kv",
        "cuda",
        Works(
            "worker/kv_connector/test_offload_copies.py"
            "::test_device_blocks_are_copied_out_and_in_through_a_pinned_page"
        ),
    ),
    (
        "host_kv",
        "async",
        Works(
            "e2e/test_offloading.py"
            "::test_concurrent_requests_with_overlapped_steps_and_a_small_medium"
        ),
    ),
    (
        "stored_kv peer_kv",
        "async",
        Works(
            "engine_core/scheduler/test_kv_transfer_failures.py::test_recompute_from_the_first_one"
        ),
    ),
    ("host_kv stored_kv", "choices", Works(LIVES)),
    ("host_kv stored_kv peer_kv", "priority agents sessions", Works(LIVES)),
    (
        "host_kv stored_kv peer_kv",
        "grammar",
        Works(
            "engine_core/structured_output/test_manager.py"
            "::test_a_preempted_choice_keeps_its_grammar_state",
            "a grammar follows the tokens, wherever their KV comes from",
        ),
    ),
    (
        "host_kv",
        "prompt_logprobs",
        Works(
            "engine_core/kv_connector/test_offload_loads.py"
            "::test_prompt_logprobs_are_computed_not_loaded"
        ),
    ),
    (
        "stored_kv peer_kv",
        "prompt_logprobs",
        Works(
            "engine_core/scheduler/test_kv_transfer.py"
            "::test_the_connector_is_not_queried_with_prompt_logprobs"
        ),
    ),
    (
        "host_kv stored_kv peer_kv",
        "pooling",
        Works(
            "engine_core/scheduler/test_kv_transfer.py"
            "::test_the_connector_is_not_queried_with_prompt_logprobs",
            "nor for a text of which all tokens are needed",
        ),
    ),
    (
        "host_kv stored_kv peer_kv",
        "prompt_embeds",
        Works(
            "engine_core/kv_cache/test_hashing.py::test_a_block_has_the_digest_of_the_embeddings_in_it",
            "stored blocks are found by the same hashes",
        ),
    ),
    (
        "host_kv stored_kv peer_kv",
        "experts",
        Refused(
            "--enable-return-routed-experts does not go with --kv-transfer-config: the experts of "
            "tokens whose KV is loaded are not known",
            "worker/test_routed_experts.py::test_kv_of_a_connector_has_no_experts",
            partial(serve, "--enable-return-routed-experts", *OFFLOADING),
        ),
    ),
    (
        "host_kv stored_kv peer_kv",
        "encoders",
        Refused(f"--kv-transfer-config: {UNCACHED}", ENCODER_SETTINGS),
    ),
    ("host_kv stored_kv peer_kv agents", "beams", Works(BEAMS_WITH_LOADS)),
    (
        "peer_kv",
        "host_kv stored_kv",
        Works(f"{PEER}::test_blocks_are_kept_until_the_workers_say_that_they_were_fetched"),
    ),
    ("peer_kv", "choices", Works(f"{PEER}::test_choices_load_once")),
    ("peer_kv", "ranks cpu", Works(TWO_DAEMONS)),
    ("peer_kv", "kv_8_bits", Works(f"{PEER_WORKERS}::test_blocks_arrive_as_they_were")),
    (
        "peer_kv",
        "replicas",
        Works(
            f"{PEER_WORKERS}::test_ports_are_tried_from_the_first_one_on",
            "each worker has an address of its own, which the answer to a prefill names",
        ),
    ),
    (
        "peer_kv",
        "kv_events",
        Works(
            "engine_core/test_process_kv_cache.py::test_kv_events_report_cached_blocks",
            "blocks of the KV pool are reported, also those that were loaded",
        ),
    ),
    (
        "peer_kv",
        "states",
        Refused(
            "kv_transfer_config: PeerConnector does not copy recurrent states",
            "proto/test_kv_peer.py::test_recurrent_states_are_refused_before_a_weight_is_read",
        ),
    ),
    (
        "kv_events",
        "kv_8_bits transformers cpu cuda invariant cascade",
        Works(
            "engine_core/test_process_kv_cache.py::test_kv_events_report_cached_blocks",
            SCHEDULER_ALONE,
        ),
    ),
    (
        "kv_events",
        "states",
        Works(
            "engine_core/kv_cache/test_kv_events.py::test_states_are_blocks_of_a_group_of_their_own"
        ),
    ),
    (
        "kv_events",
        "async",
        Works(
            "engine_core/scheduler/test_placeholders.py"
            "::test_only_tokens_that_are_known_are_ever_findable",
            "events tell of findable blocks",
        ),
    ),
    (
        "kv_events",
        "reload",
        Refused(
            "--reload-strategy side-by-side runs two engines at a time, which cannot both publish "
            "at the endpoints of --kv-events-config: give ipc, or another strategy",
            "proto/test_config.py::test_parallel_engines_need_separate_kv_event_endpoints",
            partial(serve, "--reload-strategy", "side-by-side", *EVENTS),
            part="a fixed endpoint",
            rest="proto/test_config.py::test_parallel_engines_need_separate_kv_event_endpoints",
        ),
    ),
    (
        "kv_events",
        "priority agents sessions grammar beams choices prompt_logprobs experts pooling",
        Works(
            "engine_core/kv_cache/test_kv_events.py"
            "::test_a_subscriber_ends_with_what_the_index_holds",
            "events follow the index of the prefix cache, not the parameters of requests",
        ),
    ),
    (
        "kv_events",
        "prompt_embeds",
        Works("engine_core/kv_cache/test_kv_events.py::test_extra_keys_are_listed_by_block"),
    ),
    ("kv_events", "encoders", Refused(f"--kv-events-config: {UNCACHED}", ENCODER_SETTINGS)),
    # ---- What computes ----
    (
        "kv_8_bits",
        "cpu",
        Refused(
            "--kv-cache-dtype fp8 needs --device cuda; a CPU has int8",
            "proto/test_config.py::test_fp8_without_scales_is_refused_on_a_cpu",
            partial(serve, "--device", "cpu", "--kv-cache-dtype", "fp8"),
            part="fp8",
            rest="e2e/test_kv_dtypes.py"
            "::test_int8_kv_gives_the_same_text_cold_cached_and_preempted",
        ),
    ),
    (
        "kv_8_bits",
        "cuda",
        Works("worker/attention/test_flashinfer.py::test_keys_and_values_of_eight_bits"),
    ),
    (
        "kv_8_bits cuda",
        "choices",
        Works("worker/test_cuda_runner.py::test_a_fork_copies_its_block_without_waiting"),
    ),
    (
        "kv_8_bits",
        "invariant",
        Refused(
            "--batch-invariant: a prompt reads int8 pages otherwise than a decode; "
            "--kv-cache-dtype auto works",
            NOT_INVARIANT,
            part="int8",
            rest="worker/test_cuda_runner.py::test_a_batch_invariant_step_has_decodes_alone",
        ),
    ),
    (
        "kv_8_bits",
        "async priority agents sessions grammar beams prompt_logprobs prompt_embeds experts "
        "pooling",
        Works(
            "e2e/test_kv_dtypes.py::test_int8_kv_gives_the_same_text_cold_cached_and_preempted",
            ATTENTION_ALONE,
        ),
    ),
    (
        "kv_8_bits",
        "encoders",
        Refused(f"--kv-cache-dtype: {UNCACHED}", ENCODER_SETTINGS),
    ),
    ("kv_8_bits", "transformers", Works(DRAFTS_ON_TRANSFORMERS)),
    (
        "kv_8_bits",
        "states",
        Works("worker/models/test_states.py::test_int8_kv_goes_with_states_cold_and_warm"),
    ),
    (
        "kv_8_bits",
        "cascade",
        Works(
            "worker/attention/test_flashinfer.py::test_cascade_attention_reads_a_shared_prefix_once"
        ),
    ),
    (
        "states",
        "transformers",
        Refused(
            "Qwen3NextForCausalLM cannot run through transformers: layer_types has "
            "linear_attention, whose state is not that of KV pages",
            "worker/models/test_transformers_model.py::test_what_cannot_run_is_refused_by_name",
        ),
    ),
    ("states", "cpu", Works("worker/models/test_families.py::test_a_folder")),
    (
        "states",
        "cuda",
        Works("worker/test_cuda_states.py::test_tokens_are_those_of_the_reference"),
    ),
    (
        "states",
        "cascade",
        Works(
            "worker/test_cuda_states.py::test_attention_of_hybrid_models_reads_a_shared_prefix_once"
        ),
    ),
    (
        "states",
        "invariant async",
        Works(
            "worker/models/test_states.py"
            "::test_an_answer_has_the_same_bits_alone_with_others_and_in_chunks"
        ),
    ),
    (
        "states",
        "priority",
        Works(
            "engine_core/kv_cache/test_recurrent_state.py"
            "::test_a_busy_engine_gives_each_request_its_tokens",
            "it orders the queue alone",
        ),
    ),
    (
        "states",
        "sessions",
        Works(
            "engine_core/kv_cache/test_recurrent_state.py::test_a_session_goes_on_from_its_state"
        ),
    ),
    (
        "states",
        "beams",
        Works("worker/models/test_states.py::test_beams_are_those_of_transformers"),
    ),
    (
        "states",
        "choices",
        Works("worker/models/test_states.py::test_choices_have_states_of_their_own"),
    ),
    (
        "states",
        "prompt_logprobs",
        Works(
            "engine_core/scheduler/test_sibling_forks.py"
            "::test_choices_that_end_with_their_first_token_compute_one_prompt"
        ),
    ),
    ("states transformers async choices beams", "prompt_embeds", Works(EMBEDS)),
    ("transformers", "async", Works(EMBEDS)),
    (
        "states",
        "experts",
        Works(
            "worker/test_routed_experts.py"
            "::test_the_experts_of_every_router_are_those_of_transformers"
        ),
    ),
    ("states", "agents", Works(LIVES)),
    ("states", "pooling", Works("worker/test_pooling.py::test_models_with_recurrent_states")),
    ("states", "encoders", Meaningless("a model has either")),
    (
        "states transformers",
        "grammar",
        Works(
            "engine_core/structured_output/test_manager.py"
            "::test_outputs_match_their_grammars_beside_unconstrained_ones",
            LOGITS_ALONE,
        ),
    ),
    (
        "transformers",
        "cpu",
        Works(
            "e2e/test_transformers_code.py"
            "::test_tokens_of_transformers_under_pressure_and_after_a_death"
        ),
    ),
    (
        "transformers",
        "cuda",
        Works(
            "worker/test_cuda_runner.py::test_transformers_code_gives_the_tokens_of_the_reference"
        ),
    ),
    (
        "transformers",
        "invariant",
        Refused(
            "--batch-invariant: OtherForCausalLM runs on transformers' code",
            NOT_INVARIANT,
        ),
    ),
    (
        "transformers cuda",
        "priority agents sessions",
        Works(IMPORTS, SCHEDULER_ALONE),
    ),
    (
        "transformers",
        "beams choices",
        Works("worker/test_beams.py::test_beam_search_equals_transformers", LOGITS_ALONE),
    ),
    (
        "transformers",
        "pooling encoders",
        Refused(
            "--runner pooling: OtherForCausalLM runs on transformers' code, which only generates "
            "here",
            ON_TRANSFORMERS,
        ),
    ),
    ("transformers", "prompt_logprobs", Works(DRAFTS_ON_TRANSFORMERS)),
    (
        "transformers",
        "experts",
        Refused(
            "--enable-return-routed-experts: OtherForCausalLM runs on transformers' code, which "
            "reports no experts",
            ON_TRANSFORMERS,
        ),
    ),
    (
        "transformers",
        "cascade",
        Works(
            "worker/test_cuda_runner.py::test_transformers_code_gives_the_tokens_of_the_reference"
        ),
    ),
    ("cpu", "cuda", Meaningless("both are values of `--device`")),
    (
        "cpu",
        "invariant",
        Refused(
            "--batch-invariant: f32 products are chosen by the number of rows; --cpu-weights bf16, "
            "packed or int8 works",
            NOT_INVARIANT,
            part="weights f32 or packed+int8",
            rest=INVARIANT,
        ),
    ),
    (
        "cpu",
        "cascade",
        Refused(
            "--cascade-attention-from needs --device cuda: attention on a CPU reads the pages of "
            "each sequence by themselves",
            "worker/test_memory_plan.py::test_cascade_attention_on_a_cpu_is_refused",
        ),
    ),
    (
        "cpu",
        "async",
        Works(
            "e2e/test_offloading.py"
            "::test_concurrent_requests_with_overlapped_steps_and_a_small_medium"
        ),
    ),
    (
        "cpu",
        "priority",
        Works("e2e/test_parity.py::test_preemption_by_priority_does_not_change_tokens"),
    ),
    (
        "cpu",
        "agents",
        Works("e2e/test_agents.py::test_a_session_finds_its_prefix_after_other_load"),
    ),
    (
        "cpu",
        "sessions",
        Works("e2e/test_sessions.py::test_three_session_turns_equal_three_separate_requests"),
    ),
    ("cpu", "grammar", Works("e2e/test_structured_output.py::test_every_form_of_asking")),
    ("cpu", "beams", Works("e2e/test_beams.py::test_beam_search_alone_equals_transformers")),
    ("cpu", "choices", Works("e2e/test_choices.py::test_every_greedy_choice_equals_transformers")),
    (
        "cpu choices",
        "prompt_logprobs",
        Works("e2e/test_choices.py::test_prompt_logprobs_are_computed_once_for_all_choices"),
    ),
    (
        "cpu",
        "prompt_embeds",
        Works("e2e/test_prompt_embeds.py::test_other_rows_agree_with_transformers"),
    ),
    (
        "cpu",
        "experts",
        Works(
            "e2e/test_routed_experts.py"
            "::test_experts_of_transformers_under_pressure_and_after_a_death"
        ),
    ),
    ("cpu", "pooling", Works("worker/test_pooling.py::test_the_last_token_in_all_situations")),
    ("cpu", "encoders", Works("e2e/test_encoders.py::test_embeddings")),
    (
        "cuda async",
        "invariant",
        Works("worker/test_cuda_runner.py::test_a_batch_invariant_step_has_decodes_alone"),
    ),
    (
        "cuda",
        "cascade",
        Works(
            "worker/attention/test_flashinfer.py::test_cascade_attention_reads_a_shared_prefix_once"
        ),
    ),
    (
        "cuda",
        "async",
        Works("worker/test_cuda_runner.py::test_tokens_kept_on_the_device_equal_those_of_the_host"),
    ),
    (
        "cuda async",
        "grammar",
        Works(
            "worker/test_cuda_runner.py::test_logits_edits_and_logprobs_need_no_wait_for_the_device"
        ),
    ),
    (
        "cuda async",
        "prompt_logprobs",
        Works("worker/test_cuda_runner.py::test_overlapping_steps_do_not_count_time_twice"),
    ),
    (
        "cuda async",
        "experts",
        Works("worker/test_cuda_runner.py::test_experts_of_tokens_need_no_wait_for_the_device"),
    ),
    ("cuda", "pooling", Works("worker/test_pooling_cuda.py::test_embeddings_of_a_causal_model")),
    ("cuda", "encoders", Works("worker/test_pooling_cuda.py::test_embeddings_of_encoders")),
    (
        "cuda",
        "reload",
        Refused(
            "huge does not fit into the memory of the GPU",
            "worker/test_memory_plan.py"
            "::test_a_second_generation_on_a_gpu_needs_a_pool_of_a_fixed_size",
            part="a pool that is a share of the GPU",
            rest="worker/test_memory_plan.py"
            "::test_a_second_generation_on_a_gpu_needs_a_pool_of_a_fixed_size",
        ),
    ),
    (
        "cuda",
        "beams",
        Works("worker/test_cuda_runner.py::test_beams_are_those_of_the_reference"),
    ),
    (
        "cuda",
        "prompt_embeds",
        Works(
            "worker/test_cuda_runner.py::test_prompts_as_embeddings_give_the_tokens_of_their_ids",
            "on the strict fake of a GPU",
        ),
    ),
    (
        "invariant",
        "cascade",
        Refused(
            "--batch-invariant: cascade attention depends on the batch; --cascade-attention-from 0 "
            "works",
            NOT_INVARIANT,
        ),
    ),
    (
        "invariant",
        "priority agents sessions grammar beams choices prompt_logprobs prompt_embeds",
        Works(INVARIANT, "the bits of a row do not depend on what else a step computes"),
    ),
    (
        "invariant",
        "experts",
        Refused(
            "--batch-invariant: the products of MixtralForCausalLM's experts have as many rows as "
            "tokens choose",
            NOT_INVARIANT,
            part="on GPUs",
            rest="e2e/test_routed_experts.py"
            "::test_the_mixture_kernel_answers_alike_alone_and_in_a_batch",
        ),
    ),
    (
        "invariant",
        "pooling encoders",
        Works("e2e/test_encoders.py::test_bits_of_an_embedding_alone_and_beside_others"),
    ),
    (
        "cascade",
        "async priority agents sessions grammar beams choices prompt_logprobs prompt_embeds "
        "experts pooling",
        Works(
            "worker/attention/test_flashinfer.py"
            "::test_cascade_attention_reads_a_shared_prefix_once",
            ATTENTION_ALONE,
        ),
    ),
    (
        "cascade",
        "encoders",
        Refused(f"--cascade-attention-from: {UNCACHED}", ENCODER_SETTINGS),
    ),
    # ---- What is scheduled ----
    ("async", "priority agents", Works(LIVES)),
    (
        "async",
        "sessions",
        Works("engine_core/scheduler/test_sessions.py::test_every_turn_equals_a_fresh_request"),
    ),
    (
        "async",
        "beams",
        Works("engine_core/scheduler/test_beams.py::test_results_are_those_of_a_plain_search"),
    ),
    (
        "async",
        "choices",
        Works(
            "engine_core/scheduler/test_placeholders.py"
            "::test_without_pressure_the_steps_are_those_of_one_at_a_time"
        ),
    ),
    ("async", "pooling", Works("worker/test_pooling.py::test_the_last_token_in_all_situations")),
    ("async", "encoders", Works("worker/test_encoders.py::test_embeddings_of_packed_texts")),
    (
        "reload",
        "drafts draft_model ranks host_kv stored_kv peer_kv kv_8_bits states transformers cpu "
        "invariant cascade async priority agents grammar beams choices prompt_logprobs "
        "prompt_embeds experts pooling encoders",
        Works(SIDE_BY_SIDE, "the next processes start as the first ones did"),
    ),
    (
        "reload",
        "sessions",
        Works("e2e/test_reload.py::test_a_session_goes_on_at_the_engine_that_has_it"),
    ),
    ("priority", "agents", Meaningless("both are values of `--scheduling-policy`")),
    ("priority", "sessions choices prompt_logprobs", Works(LIVES)),
    (
        "priority",
        "beams",
        Works("engine_core/scheduler/test_beams.py::test_preempted_rows_change_nothing"),
    ),
    (
        "priority",
        "grammar prompt_embeds experts pooling encoders",
        Works(
            "engine_core/scheduler/test_priority.py"
            "::test_the_lowest_priority_is_preempted_and_resumed",
            "it orders the queue alone",
        ),
    ),
    ("agents", "sessions", in_session("agent_hint", {"job_id": "j"})),
    ("agents", "choices prompt_logprobs", Works(LIVES)),
    (
        "agents",
        "grammar prompt_embeds experts",
        Works(
            "engine_core/scheduler/test_retained_prefixes.py"
            "::test_a_finished_turn_retains_its_full_blocks_for_the_next_one",
            "it keeps blocks of a request that has ended, and reads no parameter of it",
        ),
    ),
    ("sessions", "grammar", in_session("structured_outputs", {"regex": "a"})),
    ("sessions", "beams", in_session("use_beam_search", True)),
    ("sessions", "choices", in_session("n", 2)),
    ("sessions", "prompt_logprobs", in_session("prompt_logprobs", 1)),
    ("sessions", "prompt_embeds", in_session("prompt_embeds", "AAAA")),
    ("sessions", "experts", in_session("return_routed_experts", True)),
    # ---- What a request asks ----
    (
        "grammar",
        "beams",
        Refused(
            "use_beam_search cannot be combined with structured_outputs",
            "api_server/test_structured_fields.py"
            "::test_a_grammar_reaches_the_engine_and_its_error_is_a_400",
            lambda: check_grammar(
                body(use_beam_search=True),
                SimpleNamespace(field="structured_outputs"),  # type: ignore[arg-type]
            ),
        ),
    ),
    ("grammar", "choices", Works("e2e/test_structured_output.py::test_every_form_of_asking")),
    (
        "grammar",
        "prompt_logprobs prompt_embeds experts",
        Works(
            "engine_core/structured_output/test_manager.py::test_chunks_of_a_prompt_are_not_masked",
            "a grammar knows outputs alone",
        ),
    ),
    ("beams", "choices", Meaningless("`n` is the width of the search")),
    (
        "beams",
        "prompt_logprobs",
        Refused(
            "prompt_logprobs cannot be combined with use_beam_search",
            "api_server/test_bad_requests.py::test_bad_fields",
            lambda: check_beams(body(use_beam_search=True, prompt_logprobs=1)),
        ),
    ),
    (
        "beams",
        "experts",
        Refused(
            "return_routed_experts cannot be combined with use_beam_search",
            "api_server/test_bad_requests.py::test_bad_fields",
            lambda: check_beams(body(use_beam_search=True, return_routed_experts=True)),
        ),
    ),
    (
        "choices",
        "experts",
        Works("e2e/test_routed_experts.py::test_chats_streams_and_choices_return_experts"),
    ),
    (
        "prompt_logprobs",
        "prompt_embeds",
        Refused(
            "prompt_logprobs does not go with prompt_embeds",
            "e2e/test_prompt_embeds.py::test_wrong_embeddings_are_refused_by_name",
            partial(
                validate,
                RequestLimits(100, 100, embedding_bytes=4),
                prompt_embeds=b"0000",
                prompt_logprobs=1,
            ),
        ),
    ),
    ("prompt_logprobs", "experts", Works(BITS)),
    ("prompt_embeds", "experts", Works(EMBEDS)),
    (
        "agents sessions grammar beams choices prompt_logprobs prompt_embeds experts images",
        "pooling encoders",
        Refused(
            POOLED,
            "api_server/test_pooling.py::test_invalid_requests_are_named",
            lambda: AppState.check_generates(
                SimpleNamespace(pooler="mean"),  # type: ignore[arg-type]
                "Completions API",
            ),
        ),
    ),
    # ---- Images ----
    ("images", "grammar", Works(IMAGES, "a grammar knows outputs alone")),
    ("images", "choices", Works(IMAGES)),
    (
        "images",
        "sessions",
        Meaningless("images are parts of messages, and a session takes prompts"),
    ),
    (
        "images",
        "prompt_embeds",
        Meaningless("images are parts of messages; these stand for prompts"),
    ),
    (
        "images",
        "drafts draft_model",
        Works(f"{IMAGES_WITH}::test_drafts_change_no_token"),
    ),
    (
        "images",
        "adapters",
        Refused(
            "tensor base_model.model.model.vision_model.encoder.layers.0.self_attn.k_proj."
            "lora_magnitude_vector: a vision part has adapters of lora_A and lora_B alone",
            "worker/adapters/test_images.py"
            "::test_what_a_vision_part_does_not_have_is_refused_by_its_tensor",
            part="DoRA and whole weights of the vision part",
            rest="e2e/test_images.py::test_an_adapter_and_a_reload",
        ),
    ),
    ("images", "ranks", Works("worker/test_images.py::test_ranks_give_what_one_gives")),
    (
        "images",
        "host_kv stored_kv peer_kv",
        Works("e2e/test_images.py::test_kv_of_an_image_comes_back"),
    ),
    (
        "images",
        "kv_events",
        Works("engine_core/kv_cache/test_kv_events.py::test_events_name_images"),
    ),
    (
        "images",
        "kv_8_bits invariant",
        Works("e2e/test_images.py::test_answers_are_the_same_alone_in_a_batch_and_from_the_cache"),
    ),
    ("images", "states", Works(f"{IMAGES_WITH}::test_a_language_model_with_states")),
    ("images", "cpu", Works("e2e/test_images.py::test_images_between_texts")),
    (
        "images",
        "cuda",
        Refused(
            "LlavaForConditionalGeneration reads images, which runs on a CPU only so far: "
            "--device cpu is needed, or --limit-mm-per-prompt '{\"image\": 0}'",
            "worker/test_memory_plan.py::test_a_model_that_reads_images_is_refused_on_a_gpu",
        ),
    ),
    (
        "images",
        "transformers",
        Works(f"{IMAGES_WITH}::test_a_language_model_on_the_code_of_transformers"),
    ),
    ("images", "cascade", Meaningless("it is for GPUs, which refuse images")),
    (
        "images",
        "async",
        Works("worker/test_images.py::test_an_engine_plans_images_beside_other_requests"),
    ),
    ("images", "reload", Works("e2e/test_images.py::test_an_adapter_and_a_reload")),
    (
        "images",
        "priority",
        Works(
            "engine_core/scheduler/test_encoder_inputs.py"
            "::test_a_victim_gives_the_budget_of_the_step_back"
        ),
    ),
    (
        "images",
        "agents",
        Works(
            "engine_core/scheduler/test_retained_prefixes.py"
            "::test_the_next_turn_finds_images_that_other_images_have_replaced"
        ),
    ),
    ("images", "beams", Works("e2e/test_images.py::test_beams_are_those_of_transformers")),
    ("images", "prompt_logprobs", Works("e2e/test_images.py::test_logprobs_of_a_prompt")),
    (
        "images",
        "experts",
        Works(f"{IMAGES_WITH}::test_the_experts_of_image_tokens_are_those_of_transformers"),
    ),
    ("pooling", "encoders", Works("worker/test_encoders.py::test_embeddings_of_packed_texts")),
    # ---- Several engines ----
    (
        "replicas",
        "drafts draft_model kv_8_bits states transformers cpu invariant cascade async priority "
        "experts images pooling encoders prompt_embeds prompt_logprobs",
        Works(ENGINES, "an engine and its workers do not know that there are others"),
    ),
    (
        "replicas",
        "adapters agents sessions grammar beams choices",
        Works(ENGINES, "all of a request is at one engine"),
    ),
    ("replicas", "ranks", Works("deploy/test_recovery.py::test_each_engine_has_epochs_of_its_own")),
    (
        "replicas",
        "host_kv stored_kv",
        Works(
            "e2e/test_engines.py::test_an_engine_finds_at_its_start_what_another_one_has_stored",
            "names of files and keys do not depend on the engine",
        ),
    ),
    ("replicas", "kv_events", Works("e2e/test_engines.py::test_engines_publish_kv_events_apart")),
    (
        "replicas",
        "cuda",
        Works("worker/test_cuda_device.py::test_a_worker_uses_the_gpu_of_its_index"),
    ),
    (
        "replicas",
        "reload",
        Works("e2e/test_reload.py::test_several_engines_are_reloaded_while_they_stream"),
    ),
    # ---- Standby processes ----
    (
        "standby_engines standby_workers",
        "drafts draft_model adapters host_kv stored_kv peer_kv kv_events kv_8_bits states cpu "
        "invariant async priority agents sessions grammar beams choices prompt_logprobs "
        "prompt_embeds experts images pooling encoders",
        Works(STANDBY, "a standby process runs the code of any new one, by the same boot message"),
    ),
    ("standby_engines", "standby_workers", Works(STANDBY)),
    (
        "standby_engines",
        "ranks transformers cuda cascade",
        Works(STANDBY, "the engine process does not know what computes"),
    ),
    (
        "standby_engines standby_workers",
        "replicas",
        Works("deploy/test_standby.py::test_none_is_started_before_all_engines_have_caught_up"),
    ),
    (
        "standby_engines standby_workers",
        "reload",
        Works("deploy/test_standby.py::test_a_reload_replaces_standby_workers"),
    ),
    (
        "standby_workers",
        "ranks",
        Refused(
            "--standby-workers replaces one worker, and all ranks of a model are restarted "
            "together: --tensor-parallel-size 1 is needed, got 2",
            STANDBY_FLAGS,
            partial(serve, "--standby-workers", "1", "--tensor-parallel-size", "2"),
        ),
    ),
    (
        "standby_workers",
        "transformers",
        Refused(
            "--standby-workers needs weights that workers share in memory, and those of "
            "GptOssForCausalLM are not shared here: f32",
            "worker/test_memory_plan.py::test_standby_workers_need_weights_that_workers_share",
        ),
    ),
    (
        "standby_workers",
        "cuda",
        Refused(
            "--standby-workers needs --device cpu: workers on GPUs do not share their weights",
            STANDBY_FLAGS,
            partial(serve, "--standby-workers", "1", "--device", "cuda"),
        ),
    ),
    ("standby_workers", "cascade", Meaningless("it is for GPUs, which refuse standby workers")),
)


def cells() -> dict[tuple[str, str], list[Cell]]:
    """Return the cells of each pair that has one, its features in the order of the table."""
    order = list(FEATURES)
    found: dict[tuple[str, str], list[Cell]] = {}
    for some, others, cell in ENTRIES:
        for pair in itertools.product(some.split(), others.split()):
            first, second = sorted(pair, key=order.index)
            found.setdefault((first, second), []).append(cell)
    return found


def table() -> str:
    """Return the table with its notes, in Markdown; a row has the features before its own."""
    found, names = cells(), list(FEATURES)
    notes: dict[str, int] = {}
    columns = range(1, len(names))
    lines = [f"| | {' | '.join(map(str, columns))} |", f"|---|{'---|' * len(columns)}"]
    for number, name in enumerate(names, 1):
        marks = []
        for other in names[: number - 1]:
            (cell,) = found[other, name]
            note = ""
            if isinstance(cell, Refused):
                text = f"{cell.part}: `{cell.message}`" if cell.part else f"`{cell.message}`"
                note = f"[{notes.setdefault(text, len(notes) + 1)}]"
            elif isinstance(cell, Meaningless):
                text = cell.reason
                note = f"–[{notes.setdefault(text, len(notes) + 1)}]"
            works = isinstance(cell, Works) or (isinstance(cell, Refused) and cell.part)
            marks.append(f"{'✓' if works else ''}{note}")
        marks += [""] * (len(columns) - len(marks))
        lines.append(f"| {number} {FEATURES[name]} | {' | '.join(marks)} |")
    lines.append("")
    lines += [f"{number}. {text}" for text, number in notes.items()]
    return "\n".join(lines) + "\n"


def with_current_table(text: str) -> str:
    """Return the text of docs/configuration.md with the table between its markers."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_current_table(PAGE.read_text()))
