"""The faults that the test suites are held against, as data.

Each fault is one that a user of the daemon would notice. `old` occurs exactly once in its file;
test_faults.py fails where a change of the code has made that untrue, so the list stays usable.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One edit of one file that breaks a promise of the daemon.

    harm: what goes wrong for a user. tests: files or folders that most likely find it; they run
    first.
    """

    name: str
    file: str
    old: str
    new: str
    harm: str
    tests: tuple[str, ...]


PROTO = (
    Fault(
        "orphans_outlive_the_supervisor",
        "proto/process.py",
        "    _exit(1, directory, _ORPHAN_PATIENCE_SECONDS)\n",
        "    directory.leave(_ORPHAN_PATIENCE_SECONDS)\n",
        "After the supervisor is killed the other processes run on and keep port and memory.",
        ("tests/deploy/test_supervisor.py", "tests/e2e/test_life_and_death.py"),
    ),
    Fault(
        "message_overtakes_those_that_wait",
        "proto/sockets.py",
        "if self._pending or not self._try_send(frame):",
        "if not self._try_send(frame):",
        "Under load the tokens of a stream arrive in the wrong order.",
        ("tests/proto/test_sockets.py",),
    ),
    Fault(
        "repetition_found_one_pattern_early",
        "proto/repetition.py",
        "            length = size * self.min_count\n",
        "            length = size * (self.min_count - 1)\n",
        "An answer ends as repetitive although it has repeated itself less often than allowed.",
        ("tests/proto/test_sampling_params.py", "tests/engine_core/scheduler/test_completion.py"),
    ),
)

KV_CACHE = (
    Fault(
        "hash_chain_parent",
        "engine_core/kv_cache/hashing.py",
        "self._digests(block_hashes[-1], blocks)",
        "self._digests(block_hashes[0], blocks)",
        "A prompt is answered from the KV of another one that differs in the middle.",
        ("tests/engine_core/kv_cache/test_hashing.py",),
    ),
    Fault(
        "cache_salt_not_hashed",
        "engine_core/kv_cache/hashing.py",
        "content = self.root + first + extra_keys.of_block(0, size)",
        "content = self.root + first",
        "A client learns from response times what prompts clients with another salt have sent.",
        ("tests/engine_core/kv_cache/test_hashing.py",),
    ),
    Fault(
        "blocks_freed_first_one_first",
        "engine_core/kv_cache/groups.py",
        "self._pool.free_blocks(sequence.blocks[::-1])",
        "self._pool.free_blocks(sequence.blocks)",
        "The start of a shared prompt is evicted before its end, so prefixes are seldom found.",
        (
            "tests/engine_core/kv_cache/test_manager.py",
            "tests/engine_core/kv_cache/test_allocation.py",
        ),
    ),
    Fault(
        "shared_blocks_not_referenced",
        "engine_core/kv_cache/groups.py",
        "            self._pool.touch(hits)\n",
        "            self._pool.touch(hits[:1])\n",
        "Blocks that a fork or a prefix hit shares are overwritten while it still reads them.",
        ("tests/engine_core/kv_cache/test_fork.py", "tests/engine_core/kv_cache/test_manager.py"),
    ),
    Fault(
        "fork_of_a_fork_copies_an_empty_block",
        "engine_core/kv_cache/fork.py",
        "self._source_of[blocks[0]] = self._source_of.get(tail, tail)",
        "self._source_of[blocks[0]] = tail",
        "A choice or beam that forks from a new fork reads KV that was never written.",
        ("tests/engine_core/kv_cache/test_fork.py",),
    ),
    Fault(
        "window_released_one_token_early",
        "engine_core/kv_cache/sliding_window.py",
        "start, end = sequence.num_passed, (num_computed - self._window + 1) // self.block_size",
        "start, end = sequence.num_passed, (num_computed - self._window + 2) // self.block_size",
        "Models with a sliding window lose a block that the next token still reads.",
        ("tests/engine_core/kv_cache/test_hybrid.py",),
    ),
)

SCHEDULER = (
    Fault(
        "watermark_ignored",
        "engine_core/scheduler/admission_rules.py",
        "return needed + self._num_reserved <= self._kv_cache.num_free_blocks",
        "return needed <= self._kv_cache.num_free_blocks",
        "--watermark has no effect: requests are admitted and preempted again at once.",
        (
            "tests/engine_core/scheduler/test_pressure.py",
            "tests/engine_core/scheduler/test_passes.py",
        ),
    ),
    Fault(
        "admission_resumes_too_soon",
        "engine_core/scheduler/pressure.py",
        "        elif in_use < self._resume_below:\n",
        "        else:\n",
        "--resume-admission-below has no effect: admission flutters around one threshold.",
        ("tests/engine_core/scheduler/test_pressure.py",),
    ),
    Fault(
        "preempted_request_loses_a_token",
        "engine_core/scheduler/output_builder.py",
        "resumed_output_token_ids=[request.output_token_ids for request in resumed],",
        "resumed_output_token_ids=[request.output_token_ids[:-1] for request in resumed],",
        "A request that was preempted goes on without the last token that its client has.",
        ("tests/engine_core/scheduler/test_preemption.py",),
    ),
    Fault(
        "deadline_ignored",
        "engine_core/scheduler/deadlines.py",
        "for moment in {queue_deadline, message.deadline} - {inf}:",
        "for moment in {queue_deadline} - {inf}:",
        "A request with a time limit runs on after it.",
        ("tests/engine_core/scheduler/test_deadlines.py",),
    ),
    Fault(
        "queue_limit_ignored",
        "engine_core/scheduler/backlog.py",
        "if not self.limit or self.waiting + self.more <= self.limit:",
        "if not self.limit or self.waiting <= self.limit + self.more:",
        "An overloaded server queues requests beyond --max-num-queued-reqs instead of refusing.",
        ("tests/engine_core/scheduler/test_backlog.py",),
    ),
    Fault(
        "tenant_share_ignored",
        "engine_core/scheduler/tenants.py",
        "            account.served += num_missing\n",
        "            account.served += 0\n",
        "One tenant with long prompts takes the whole server from the others.",
        ("tests/engine_core/scheduler/test_tenants.py",),
    ),
    Fault(
        "pin_never_expires",
        "engine_core/scheduler/pins.py",
        "while (pin := self._deadlines.first_up_to(now)) is not None:",
        "while (pin := self._deadlines.first_up_to(now - 1e9)) is not None:",
        "KV of agents that never come back stays pinned.",
        ("tests/engine_core/scheduler/test_pins.py",),
    ),
    Fault(
        "worker_crash_not_counted",
        "engine_core/scheduler/quarantine.py",
        "            request.crash_count += 1\n",
        "            request.crash_count += 0\n",
        "A request that kills the worker is tried again for ever and takes all others along.",
        ("tests/engine_core/scheduler/test_quarantine.py",),
    ),
    Fault(
        "nonfinite_kv_stays_findable",
        "engine_core/scheduler/result_pass.py",
        "                self._withdraw(request)\n"
        "                request.num_computed_tokens = 0\n",
        "                request.num_computed_tokens = 0\n",
        "After one request with NaN logits others fail that share its prompt.",
        ("tests/engine_core/scheduler/test_corruption.py",),
    ),
    Fault(
        "failed_load_taken_for_loaded",
        "engine_core/scheduler/external_kv.py",
        "                load.num_tokens = min(load.num_tokens, num_sound)\n",
        "",
        "A request computes on KV that a connector failed to load, and answers nonsense.",
        ("tests/engine_core/scheduler/test_external_kv_failures.py",),
    ),
    Fault(
        "stop_token_ends_before_min_tokens",
        "engine_core/scheduler/completion.py",
        "        and num_output_tokens >= request.sampling_params.min_tokens\n    ):\n"
        "        return RequestStatus.FINISHED_STOPPED\n",
        "    ):\n        return RequestStatus.FINISHED_STOPPED\n",
        "An answer is shorter than its min_tokens.",
        ("tests/engine_core/scheduler/test_completion.py",),
    ),
    Fault(
        "worker_message_of_another_epoch",
        "engine_core/executor/local.py",
        "if message.epoch != self._epoch:",
        "if message.epoch > self._epoch:",
        "After a restart of the worker tokens of the dead one are appended to answers.",
        ("tests/engine_core/test_links.py", "tests/engine_core/test_engine_lives.py"),
    ),
    Fault(
        "kv_event_number_stands_still",
        "engine_core/kv_events.py",
        "            self._sequence += 1\n",
        "            self._sequence += 0\n",
        "A router that follows KV events cannot see that it has missed some.",
        ("tests/engine_core/test_process_kv_cache.py",),
    ),
)

WORKER = (
    Fault(
        "engine_message_of_another_epoch",
        "worker/service.py",
        "self._inbox.put([each for each in messages if each.epoch == self._epoch])",
        "self._inbox.put(messages)",
        "After an engine died the worker computes its last step for the next one.",
        ("tests/worker/test_service.py", "tests/worker/test_inbox.py"),
    ),
    Fault(
        "grammar_mask_of_the_next_row",
        "worker/sample/grammar_masks.py",
        "words[[place[handles[row]] for row in rows]]",
        "words[[(place[handles[row]] + 1) % len(words) for row in rows]]",
        "Requests with structured output are held to the grammars of each other.",
        ("tests/worker/sample/test_grammar_masks.py", "tests/worker/test_step_sampler.py"),
    ),
    Fault(
        "repetition_penalty_forgets_the_prompt",
        "worker/sample/row_edits.py",
        "seen = prompt if edits.repetition_penalty != 1.0 else ()",
        "seen = ()",
        "repetition_penalty does not count the tokens of the prompt.",
        ("tests/worker/sample/test_edits.py",),
    ),
    Fault(
        "penalties_count_the_prompt_as_output",
        "worker/sample/row_edits.py",
        "self.counts = TokenCounts(seen, outputs if edits.penalises else ())",
        "self.counts = TokenCounts((), [*seen, *outputs] if edits.penalises else ())",
        "frequency_penalty and presence_penalty punish words of the prompt.",
        ("tests/worker/sample/test_edits.py",),
    ),
    Fault(
        "bad_word_needs_one_more_token",
        "worker/sample/row_edits.py",
        "            if length <= len(self._tail):\n",
        "            if length < len(self._tail):\n",
        "A bad word is said where it stands at the very beginning of an answer.",
        ("tests/worker/sample/test_edits.py",),
    ),
    Fault(
        "draw_keyed_by_row",
        "worker/sample/sampler.py",
        "keys = DrawKeys(rows.seed[drawn], rows.choice[drawn], rows.position[drawn])",
        "keys = DrawKeys(rows.seed[drawn], drawn.astype(np.uint32), rows.position[drawn])",
        "A request with a seed gets other tokens whenever other requests run beside it.",
        ("tests/worker/sample/test_sampler.py",),
    ),
    Fault(
        "min_tokens_ignored",
        "worker/batch/rows.py",
        "self.min_output[row] = params.min_tokens",
        "self.min_output[row] = 0",
        "The model ends its answer before min_tokens, and nonsense follows until they are there.",
        ("tests/worker/test_step_sampler.py",),
    ),
    Fault(
        "logprob_rank_from_zero",
        "worker/sample/order.py",
        "return better.sum(dim=1) + 1",
        "return better.sum(dim=1)",
        "The rank of a token in prompt_logprobs is one too small.",
        ("tests/worker/sample/test_logprobs.py",),
    ),
    Fault(
        "top_k_keeps_ties",
        "worker/csrc/filter.cpp",
        "other > score || (other == score && id <= token)",
        "other >= score",
        "top_k keeps more than k tokens where several are equally likely.",
        ("tests/worker/sample/test_filters.py",),
    ),
    Fault(
        "chunk_position_off_by_one",
        "worker/batch/inputs.py",
        "        positions=positions,\n        rows=step_rows,\n",
        "        positions=positions + np.repeat((num_computed > 0) & (num_scheduled > 1), "
        "num_scheduled),\n        rows=step_rows,\n",
        "A prompt that is computed in chunks, or after a prefix hit, gets another answer.",
        ("tests/worker/batch/test_rows.py", "tests/worker/test_model_runner.py"),
    ),
    Fault(
        "last_token_of_a_page_not_read",
        "worker/csrc/attention_piece.h",
        "end = std::min<int64_t>(from + t->piece_len, t->kv_end);",
        "end = std::min<int64_t>(from + t->piece_len - 1, t->kv_end);",
        "Long prompts are read with a token missing at the end of each full piece of KV.",
        ("tests/worker/attention/test_attention.py",),
    ),
    Fault(
        "window_one_token_long",
        "worker/attention/cpu.py",
        "window=_UNBOUNDED if window is None else window,",
        "window=_UNBOUNDED if window is None else window + 1,",
        "Models with a sliding window see a token that they were not trained to see.",
        ("tests/worker/attention/test_attention.py",),
    ),
    Fault(
        "block_scale_of_the_other_half",
        "worker/csrc/packed_source.h",
        "reinterpret_cast<const int8_t*>(scales) + half * PANEL + output)",
        "reinterpret_cast<const int8_t*>(scales) + output + half * 0)",
        "GGUF files of type Q6_K are read with the wrong scale for half of their weights.",
        ("tests/worker/layers/test_packed_weight.py",),
    ),
    Fault(
        "vocabulary_shards_in_the_wrong_order",
        "worker/layers/shared_linear.py",
        "torch.cat([part[:, :size] for part, size in parts], dim=1)",
        "torch.cat([part[:, :size] for part, size in [*parts][::-1]], dim=1)",
        "With --tensor-parallel-size 2 the answers are other words.",
        ("tests/worker/layers/test_shared_linear.py",),
    ),
    Fault(
        "disk_checksum_not_compared",
        "worker/kv_connector/offload/block_image.py",
        "        and crc == zlib.crc32(content)\n",
        "",
        "A damaged file of the disk tier is taken for KV.",
        ("tests/worker/kv_connector/test_block_image.py",),
    ),
    Fault(
        "shared_storage_checksum_not_compared",
        "worker/kv_connector/shared_storage.py",
        'if len(body) != memory.numel() or zlib.crc32(body) != int.from_bytes(checksum, "little"):',
        "if len(body) != memory.numel():",
        "A damaged file of the shared folder is taken for KV.",
        ("tests/worker/kv_connector/test_shared_storage.py",),
    ),
)

API_SERVER = (
    Fault(
        "engine_output_of_another_epoch",
        "api_server/engine_connection.py",
        "if message.epoch != self.epoch:",
        "if message.epoch > self.epoch:",
        "What a dead engine has sent last is appended to answers of the next one.",
        ("tests/api_server/test_engine_restart.py",),
    ),
    Fault(
        "stop_string_cut_late",
        "api_server/outputs/stop_strings.py",
        "return text[: end - hidden], longest.string",
        "return text[: end - hidden + 1], longest.string",
        "An answer ends with the first character of its stop string.",
        ("tests/api_server/test_stop_strings.py",),
    ),
    Fault(
        "stop_string_does_not_stop_the_engine",
        "api_server/engine_client.py",
        '            self._abort(entry, "stop_string", output.choice)\n',
        "            pass\n",
        "The engine computes up to max_tokens for answers that a stop string has ended.",
        ("tests/api_server/test_completion_choices.py", "tests/api_server/test_streams.py"),
    ),
    Fault(
        "abort_not_sent_on_disconnect",
        "api_server/outputs/generation.py",
        "        running = [choice for choice in stream.choices if not choice.finished]\n"
        "        self.client.abandon(stream)\n",
        "        running = [choice for choice in stream.choices if not choice.finished]\n",
        "The engine goes on computing for clients that have left.",
        ("tests/api_server/test_streams.py", "tests/api_server/test_stream_failures.py"),
    ),
    Fault(
        "usage_counts_the_prompt_per_choice",
        "api_server/outputs/generation.py",
        "sum(len(stream.prompt_token_ids) for stream in self.streams),",
        "sum(len(stream.prompt_token_ids) * stream.num_choices for stream in self.streams),",
        "A client is charged for its prompt once for each of its n choices.",
        ("tests/api_server/test_completion_choices.py", "tests/api_server/test_completions.py"),
    ),
    Fault(
        "usage_counts_tokens_twice",
        "api_server/outputs/request_stream.py",
        "return sum(len(choice.token_ids) for choice in self.choices)",
        "return sum(2 * len(choice.token_ids) for choice in self.choices)",
        "completion_tokens in the usage is twice the number of tokens.",
        ("tests/api_server/test_completions.py",),
    ),
    Fault(
        "resumption_repeats_tokens",
        "api_server/outputs/request_stream.py",
        "return min(have - output.token_index, len(output.new_token_ids))",
        "return 0",
        "After a restart of the engine a client gets some tokens a second time.",
        ("tests/api_server/test_request_stream.py", "tests/api_server/test_engine_restart.py"),
    ),
    Fault(
        "prompt_counted_again_after_a_restart",
        "api_server/outputs/request_stream.py",
        "        if not self.accepted:\n            self.accepted = True\n",
        "        if True:\n            self.accepted = True\n",
        "The metric vllm:prompt_tokens counts a prompt once more after each engine restart.",
        ("tests/api_server/test_engine_restart.py", "tests/api_server/test_metrics.py"),
    ),
    Fault(
        "engine_crash_not_counted",
        "api_server/open_requests.py",
        "self.crash_count += self.alone or self.crash_count < crashes_until_alone",
        "self.crash_count += 0",
        "A request that kills the engine is sent to each next one and kills it as well.",
        ("tests/api_server/test_engine_restart.py",),
    ),
    Fault(
        "split_character_replaced",
        "api_server/outputs/detokenizer.py",
        "decoded = self._decoder.decode(self._tokens.raw(token_id))",
        "decoded = self._decoder.decode(self._tokens.raw(token_id), final=True)",
        "Emoji and rare characters that take several tokens arrive as U+FFFD.",
        ("tests/api_server/test_detokenizer.py",),
    ),
    Fault(
        "tool_arguments_cut",
        "api_server/protocol/chat_answer.py",
        'calls[-1]["function"]["arguments"] += part.text',
        'calls[-1]["function"]["arguments"] = part.text[:-1]',
        "The arguments of a streamed tool call are no JSON: their last character is missing.",
        ("tests/api_server/tools",),
    ),
    Fault(
        "finish_reason_stop_after_tool_calls",
        "api_server/protocol/chat_answer.py",
        "self.has_calls = self.has_calls or any(isinstance(each, CallBegins) for each in parts)",
        "self.has_calls = any(isinstance(each, CallBegins) for each in parts)",
        "A streamed answer that calls a tool ends with finish_reason stop, so no tool is run.",
        ("tests/api_server/tools", "tests/api_server/test_streams_and_wholes.py"),
    ),
    Fault(
        "seed_ignored",
        "api_server/routes/prepare.py",
        "return next(self._services.seeds) if seed is None else seed & SEED_MASK",
        "return next(self._services.seeds)",
        "Two requests with the same seed get different answers.",
        ("tests/api_server/test_parameters.py", "tests/api_server/test_completions.py"),
    ),
    Fault(
        "api_key_compared_as_prefix",
        "api_server/middleware.py",
        "if hmac.compare_digest(given, each.key)]",
        "if each.key.startswith(given)]",
        "The first characters of an API key let a client in.",
        ("tests/api_server/test_api_key.py",),
    ),
    Fault(
        "browser_may_call_admin_routes",
        "api_server/routes/access.py",
        "if not is_loopback(address) or any(name in request.headers for name in _SIGNS_OF_OTHERS):",
        "if not is_loopback(address):",
        "Any web page that an operator opens can pause the server.",
        ("tests/api_server/test_admin.py", "tests/api_server/test_api_key.py"),
    ),
    Fault(
        "body_limit_ignored_without_length",
        "api_server/routes/body.py",
        "                if len(body) > MAX_BODY_BYTES:\n",
        "                if announced and len(body) > MAX_BODY_BYTES:\n",
        "A chunked upload fills the memory of the front end.",
        ("tests/api_server/test_bad_bodies.py", "tests/api_server/test_limits.py"),
    ),
    Fault(
        "drain_takes_new_requests",
        "api_server/middleware.py",
        "        elif services.door.closed:\n",
        "        elif False:\n",
        "A daemon that drains takes new requests and aborts them when its time is over.",
        ("tests/api_server/test_drain.py",),
    ),
    Fault(
        "slow_reader_never_ended",
        "api_server/outputs/unsent.py",
        "if self.is_blocked and self.num_bytes > self._limit:",
        "if False:",
        "A client that does not read its stream fills the memory of the front end.",
        ("tests/api_server/test_slow_clients.py",),
    ),
    Fault(
        "restarts_added_up_over_front_ends",
        "api_server/metric_sheet.py",
        "return max(row[0] for row in self._sheet.of_each(self._cell, 1))",
        "return sum(row[0] for row in self._sheet.of_each(self._cell, 1))",
        "With several front ends tokend:restarts counts each restart several times.",
        ("tests/api_server/test_metric_sheet.py",),
    ),
)

DEPLOY = (
    Fault(
        "restart_not_counted",
        "deploy/restart_budget.py",
        "        self._spent += 1\n",
        "        self._spent += 0\n",
        "A daemon whose worker dies at each start restarts it for ever instead of ending.",
        ("tests/deploy/test_recovery.py", "tests/deploy/test_parts.py"),
    ),
    Fault(
        "heartbeat_of_dead_workers_renews_the_budget",
        "deploy/recovery.py",
        "            if message.worker_epoch == self._births.worker_epoch:\n"
        "                self._budget.renew()\n",
        "            self._budget.renew()\n",
        "A daemon whose new workers die at once restarts them for ever.",
        ("tests/deploy/test_recovery.py",),
    ),
    Fault(
        "hung_worker_not_found",
        "deploy/hangs.py",
        "                owes = index in report.awaits\n",
        "                owes = False\n",
        "A worker that hangs is never killed, and every request waits for ever.",
        ("tests/deploy/test_hangs.py",),
    ),
    Fault(
        "command_line_loses_to_the_file",
        "deploy/flags.py",
        "values = {**environment, **from_file, **arguments.values}",
        "values = {**environment, **arguments.values, **from_file}",
        "A flag on the command line is silently ignored where the file of --config has the key.",
        ("tests/deploy/test_flags.py",),
    ),
    Fault(
        "secret_shown_in_the_process_list",
        "deploy/flags.py",
        "        hide_next = not hide_next and word in names\n",
        "        hide_next = False\n",
        "Every user of the machine reads the API key in the list of processes.",
        ("tests/deploy/test_flags.py", "tests/deploy/test_cli.py"),
    ),
    Fault(
        "downloaded_model_not_checked",
        "deploy/fetch.py",
        "    if digest.hexdigest() != model.sha256:\n",
        "    if False:\n",
        "A model file that was tampered with on its way is loaded.",
        ("tests/deploy/test_fetch.py",),
    ),
    Fault(
        "drain_does_not_wait",
        "deploy/draining.py",
        "return not any(each != 0 for each in self._under_way.values()) or self._timed_out",
        "return not any(self._under_way.values()) or self._timed_out",
        "A drain aborts requests at once, before the front ends have said what is under way.",
        ("tests/deploy/test_draining.py",),
    ),
)

FAULTS = (*PROTO, *KV_CACHE, *SCHEDULER, *WORKER, *API_SERVER, *DEPLOY)
