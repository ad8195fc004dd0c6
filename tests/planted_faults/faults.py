"""The faults that the test suites must find, as data.

A user of the daemon would notice each of them. `old` occurs exactly once in its file;
test_faults.py fails when a change of the code makes that untrue, so the list stays usable.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One edit of one file that breaks a promise of the daemon.

    harm: what goes wrong for a user. tests: files or folders whose tests most likely find the
    fault; these tests run first.
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
        "    _exit(1, directory, _ORPHAN_WAIT_SECONDS)\n",
        "    directory.leave(_ORPHAN_WAIT_SECONDS)\n",
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
        "proto/sampling_params.py",
        "            length = size * self.min_count\n",
        "            length = size * (self.min_count - 1)\n",
        "An answer ends as repetitive although it has repeated itself less often than allowed.",
        ("tests/proto/test_sampling_params.py", "tests/engine_core/scheduler/test_completion.py"),
    ),
    Fault(
        "redis_database_not_selected",
        "proto/redis_client.py",
        "        if address.database:\n",
        "        if address.database and address.password == '':\n",
        "Two daemons that name different Redis databases share one.",
        ("tests/proto/test_redis_client.py",),
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
        "content = self.root + first + _salt_key(cache_salt)",
        "content = self.root + first",
        "A client learns from response times what prompts clients with another salt have sent.",
        ("tests/engine_core/kv_cache/test_hashing.py",),
    ),
    Fault(
        "blocks_freed_first_one_first",
        "engine_core/kv_cache/groups.py",
        "self.pool.free_blocks(sequence.blocks[::-1])",
        "self.pool.free_blocks(sequence.blocks)",
        "The start of a shared prompt is evicted before its end, so prefixes are seldom found.",
        (
            "tests/engine_core/kv_cache/test_manager.py",
            "tests/engine_core/kv_cache/test_allocation.py",
        ),
    ),
    Fault(
        "shared_blocks_not_referenced",
        "engine_core/kv_cache/groups.py",
        "            self.pool.touch(hits)\n            sequence.blocks.extend(hits)\n"
        "            sequence.num_cached = len(hits)\n\n",
        "            self.pool.touch(hits[:1])\n            sequence.blocks.extend(hits)\n"
        "            sequence.num_cached = len(hits)\n\n",
        "Blocks that a fork or a prefix hit shares are overwritten while it still reads them.",
        ("tests/engine_core/kv_cache/test_fork.py", "tests/engine_core/kv_cache/test_manager.py"),
    ),
    Fault(
        "fork_of_a_fork_copies_an_empty_block",
        "engine_core/kv_cache/coordinator.py",
        "self._source_of[blocks[0]] = self._source_of.get(tail, tail)",
        "self._source_of[blocks[0]] = tail",
        "A choice or beam that forks from a new fork reads KV that was never written.",
        ("tests/engine_core/kv_cache/test_fork.py",),
    ),
    Fault(
        "window_released_one_token_early",
        "engine_core/kv_cache/groups.py",
        "start, end = sequence.num_skipped, (num_computed - self._window + 1) // self.block_size",
        "start, end = sequence.num_skipped, (num_computed - self._window + 2) // self.block_size",
        "Models with a sliding window lose a block that the next token still reads.",
        ("tests/engine_core/kv_cache/test_hybrid.py",),
    ),
    Fault(
        "whole_prompt_found",
        "engine_core/kv_cache/manager.py",
        "find_longest_hit(request.block_hashes, request.num_tokens - 1)",
        "find_longest_hit(request.block_hashes, request.num_tokens)",
        "A prompt that is cached to its last token gets no answer, or a wrong one.",
        ("tests/engine_core/kv_cache/test_manager.py",),
    ),
    Fault(
        "overwritten_block_stays_findable",
        "engine_core/kv_cache/pool.py",
        "            if hashes[block] is not None:\n                self._evict(block)",
        "            if hashes[block] is None:\n                continue",
        "A prompt is answered from KV that another request has overwritten.",
        ("tests/engine_core/kv_cache/test_pool.py",),
    ),
    Fault(
        "window_hit_lacks_a_block",
        "engine_core/kv_cache/groups.py",
        "        num_needed = self._num_seen_blocks\n",
        "        num_needed = max(1, self._num_seen_blocks - 1)\n",
        "Models with a sliding window start from a prefix that is not all there.",
        ("tests/engine_core/kv_cache/test_hybrid.py",),
    ),
    Fault(
        "pending_copy_not_cancelled",
        "engine_core/kv_cache/manager.py",
        "        if self._pending_copies:\n"
        "            self._pending_copies.cancel(self._pool_blocks(request.seq_id))\n",
        "",
        "The copy for a fork that has ended overwrites the KV of another request.",
        ("tests/engine_core/kv_cache/test_fork.py",),
    ),
)

SCHEDULER = (
    Fault(
        "watermark_ignored",
        "engine_core/scheduler/admission.py",
        "return needed + self._num_reserved <= self._kv_cache.num_free_blocks",
        "return needed <= self._kv_cache.num_free_blocks",
        "--watermark has no effect: requests are admitted and preempted again at once.",
        (
            "tests/engine_core/scheduler/test_kv_watermarks.py",
            "tests/engine_core/scheduler/test_passes.py",
        ),
    ),
    Fault(
        "admission_resumes_too_soon",
        "engine_core/scheduler/preemption.py",
        "        elif in_use < self._resume_below:\n",
        "        else:\n",
        "--resume-admission-below has no effect: admission flutters around one threshold.",
        ("tests/engine_core/scheduler/test_kv_watermarks.py",),
    ),
    Fault(
        "preempted_request_loses_a_token",
        "engine_core/scheduler/output.py",
        "resumed_output_token_ids=[request.output_token_ids for request in resumed],",
        "resumed_output_token_ids=[request.output_token_ids[:-1] for request in resumed],",
        "A request that was preempted continues without the last token that its client has.",
        ("tests/engine_core/scheduler/test_preemption.py",),
    ),
    Fault(
        "deadline_ignored",
        "engine_core/scheduler/limits.py",
        "for deadline in {queue_deadline, message.deadline} - {inf}:",
        "for deadline in {queue_deadline} - {inf}:",
        "A request with a time limit runs on after it.",
        ("tests/engine_core/scheduler/test_deadlines.py",),
    ),
    Fault(
        "queue_limit_ignored",
        "engine_core/scheduler/limits.py",
        "if not limit or num_waiting + num_new <= limit:",
        "if not limit or num_waiting <= limit + num_new:",
        "An overloaded server queues requests beyond --max-num-queued-reqs instead of refusing.",
        ("tests/engine_core/scheduler/test_queue_limits.py",),
    ),
    Fault(
        "tenant_share_ignored",
        "engine_core/scheduler/tenant_usage.py",
        "            account.served += num_missing\n",
        "            account.served += 0\n",
        "One tenant with long prompts takes the whole server from the others.",
        ("tests/engine_core/scheduler/test_tenants.py",),
    ),
    Fault(
        "pin_never_expires",
        "engine_core/retention/retained_prefixes.py",
        "while (prefix := self._deadlines.first_up_to(now)) is not None:",
        "while (prefix := self._deadlines.first_up_to(now - 1e9)) is not None:",
        "KV of agents that never come back stays pinned.",
        ("tests/engine_core/scheduler/test_retained_prefixes.py",),
    ),
    Fault(
        "worker_crash_not_counted",
        "engine_core/scheduler/crash_isolation.py",
        "            request.crash_count += 1\n",
        "            request.crash_count += 0\n",
        "A request that kills the worker is tried again for ever and ends all others with it.",
        ("tests/engine_core/scheduler/test_crash_isolation.py",),
    ),
    Fault(
        "nonfinite_kv_stays_findable",
        "engine_core/scheduler/result.py",
        "                self._discard_kv(request)\n"
        "                request.num_computed_tokens = 0\n",
        "                request.num_computed_tokens = 0\n",
        "After one request with NaN logits others fail that share its prompt.",
        ("tests/engine_core/scheduler/test_corruption.py",),
    ),
    Fault(
        "failed_load_taken_for_loaded",
        "engine_core/scheduler/kv_transfer.py",
        "                load.num_tokens = min(load.num_tokens, num_valid)\n",
        "",
        "A request computes on KV that a connector failed to load, and answers nonsense.",
        ("tests/engine_core/scheduler/test_kv_transfer_failures.py",),
    ),
    Fault(
        "stop_token_ends_before_min_tokens",
        "engine_core/scheduler/lifecycle.py",
        "        and num_output_tokens >= request.sampling_params.min_tokens\n    ):\n"
        "        return RequestStatus.FINISHED_STOPPED\n",
        "    ):\n        return RequestStatus.FINISHED_STOPPED\n",
        "An answer is shorter than its min_tokens.",
        ("tests/engine_core/scheduler/test_completion.py",),
    ),
    Fault(
        "worker_message_of_another_epoch",
        "engine_core/worker_group.py",
        "if message.epoch != self.epoch:",
        "if message.epoch > self.epoch:",
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
    Fault(
        "least_urgent_admitted_first",
        "engine_core/scheduler/queues/priority.py",
        "def add_request(self, request: Request) -> None:\n"
        "        self.insert(request, request.order)",
        "def add_request(self, request: Request) -> None:\n"
        "        self.insert(request, (-request.priority, *request.order[1:]))",
        "With --scheduling-policy priority urgent requests wait longest.",
        ("tests/engine_core/scheduler/queues/test_priority.py",),
    ),
    Fault(
        "most_urgent_preempted_first",
        "engine_core/scheduler/queues/priority.py",
        "return -priority, -arrival, -request_id, -choice",
        "return priority, -arrival, -request_id, -choice",
        "With --scheduling-policy priority urgent requests are preempted for others.",
        (
            "tests/engine_core/scheduler/test_priority.py",
            "tests/engine_core/scheduler/test_preemption_order.py",
        ),
    ),
    Fault(
        "preempted_request_goes_to_the_end",
        "engine_core/scheduler/queues/fcfs.py",
        "        self._first -= 1\n        self.insert(request, self._first)",
        "        self.add_request(request)",
        "A request that was preempted waits behind all that came after it.",
        ("tests/engine_core/scheduler/queues/test_fcfs.py",),
    ),
    Fault(
        "one_request_more_than_max_num_seqs",
        "engine_core/scheduler/admission.py",
        "        return len(self._running) < self._max_running\n",
        "        return len(self._running) <= self._max_running\n",
        "--max-num-seqs is exceeded.",
        ("tests/engine_core/scheduler/test_passes.py",),
    ),
    Fault(
        "followers_never_woken",
        "engine_core/scheduler/prefix_sharing.py",
        "        for _, ticket in leader.waiters:\n"
        "            self._end_wait(ticket, leader.num_lost + 1)",
        "        leader.waiters.clear()",
        "Requests that wait for a prefix another one computes wait for ever when that one ends.",
        ("tests/engine_core/scheduler/test_prefix_wait.py",),
    ),
    Fault(
        "copied_blocks_given_away",
        "engine_core/scheduler/kv_transfer.py",
        "        if delays:\n            self._kv_cache.transfer_refs.hold(blocks)\n",
        "        if delays:\n",
        "A KV connector reads blocks that already hold another request.",
        ("tests/engine_core/scheduler/test_kv_transfer.py",),
    ),
)

WORKER = (
    Fault(
        "engine_message_of_another_epoch",
        "worker/worker.py",
        "[message for message in messages if message.epoch == self._epoch]",
        "list(messages)",
        "After an engine died the worker computes its last step for the next one.",
        ("tests/worker/test_service.py", "tests/worker/test_inbox.py"),
    ),
    Fault(
        "grammar_mask_of_the_next_row",
        "worker/sampling/logit_edits.py",
        "words[masks_of[seq_id].pop()]",
        "words[(masks_of[seq_id].pop() + 1) % len(words)]",
        "Requests with structured output are held to the grammars of each other.",
        ("tests/worker/sampling/test_grammar_masks.py", "tests/worker/test_step_sampler.py"),
    ),
    Fault(
        "repetition_penalty_forgets_the_prompt",
        "worker/sampling/logit_edits.py",
        "seen = prompt if edits.repetition_penalty != 1.0 else ()",
        "seen = ()",
        "repetition_penalty does not count the tokens of the prompt.",
        ("tests/worker/sampling/test_edits.py",),
    ),
    Fault(
        "penalties_count_the_prompt_as_output",
        "worker/sampling/logit_edits.py",
        "self.counts = TokenCounts(seen, outputs if edits.penalises else ())",
        "self.counts = TokenCounts((), [*seen, *outputs] if edits.penalises else ())",
        "frequency_penalty and presence_penalty punish words of the prompt.",
        ("tests/worker/sampling/test_edits.py",),
    ),
    Fault(
        "bad_word_needs_one_more_token",
        "worker/sampling/logit_edits.py",
        "            if length <= len(self._tail):\n",
        "            if length < len(self._tail):\n",
        "A bad word is generated at the very beginning of an answer.",
        ("tests/worker/sampling/test_edits.py",),
    ),
    Fault(
        "draw_keyed_by_row",
        "worker/sampling/sampler.py",
        "        token_ids[drawn] = self.backend.draw(logits, drawn, params[drawn])\n",
        "        keyed = params[drawn]\n"
        '        keyed["choice"] = drawn\n'
        "        token_ids[drawn] = self.backend.draw(logits, drawn, keyed)\n",
        "A request with a seed gets other tokens whenever other requests run beside it.",
        ("tests/worker/sampling/test_sampler.py",),
    ),
    Fault(
        "min_tokens_ignored",
        "worker/input_batch.py",
        "self.min_output[row] = params.min_tokens",
        "self.min_output[row] = 0",
        "The model ends its answer before min_tokens, and nonsense fills the rest.",
        ("tests/worker/test_step_sampler.py",),
    ),
    Fault(
        "logprob_rank_from_zero",
        "worker/sampling/torch_backend.py",
        "return better.sum(dim=1) + 1",
        "return better.sum(dim=1)",
        "The rank of a token in prompt_logprobs is one too small.",
        ("tests/worker/sampling/test_logprobs.py",),
    ),
    Fault(
        "top_k_keeps_ties",
        "worker/csrc/sampling/filter.cpp",
        "other > score || (other == score && id <= token)",
        "other >= score",
        "top_k keeps more than k tokens where several are equally likely.",
        ("tests/worker/sampling/test_filters.py",),
    ),
    Fault(
        "chunk_position_off_by_one",
        "worker/input_batch.py",
        "        positions=positions,\n        rows=step_rows,\n",
        "        positions=positions + np.repeat((num_computed > 0) & (num_scheduled > 1), "
        "num_scheduled),\n        rows=step_rows,\n",
        "A prompt that is computed in chunks, or after a prefix hit, gets another answer.",
        ("tests/worker/test_input_batch.py", "tests/worker/test_model_runner.py"),
    ),
    Fault(
        "last_token_of_a_page_not_read",
        "worker/csrc/attention/piece.h",
        "end = std::min<int64_t>(from + t->piece_len, t->kv_end);",
        "end = std::min<int64_t>(from + t->piece_len - 1, t->kv_end);",
        "Long prompts are read with a token missing at the end of each full KV block.",
        ("tests/worker/attention/test_attention.py",),
    ),
    Fault(
        "window_one_token_long",
        "worker/attention/cpu.py",
        "tokens = _UNBOUNDED if window is None else window\n",
        "tokens = _UNBOUNDED if window is None else window + 1\n",
        "Models with a sliding window see a token that they were not trained to see.",
        ("tests/worker/attention/test_attention.py",),
    ),
    Fault(
        "block_scale_of_the_other_half",
        "worker/csrc/products/packed/packed_tile.h",
        "reinterpret_cast<const int8_t*>(scales) + half * PANEL + output)",
        "reinterpret_cast<const int8_t*>(scales) + output + half * 0)",
        "GGUF files of type Q6_K are read with the wrong scale for half of their weights.",
        ("tests/worker/layers/test_packed_weight.py",),
    ),
    Fault(
        "vocabulary_shards_in_the_wrong_order",
        "worker/layers/linear.py",
        "torch.cat([part[:, :size] for part, size in parts], dim=1)",
        "torch.cat([part[:, :size] for part, size in [*parts][::-1]], dim=1)",
        "With --tensor-parallel-size 2 the answers are other words.",
        ("tests/worker/layers/test_rank_parallel.py",),
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
        "api_server/engine/engine_client.py",
        "if message.epoch != self.epoch:",
        "if message.epoch > self.epoch:",
        "The last messages of a dead engine are appended to answers of the next one.",
        ("tests/api_server/test_engine_restart.py",),
    ),
    Fault(
        "stop_string_cut_late",
        "api_server/text/stop_strings.py",
        "else end - len(stop)], stop",
        "else end - len(stop) + 1], stop",
        "An answer ends with the first character of its stop string.",
        ("tests/api_server/test_stop_strings.py",),
    ),
    Fault(
        "stop_string_does_not_stop_the_engine",
        "api_server/engine/engine_client.py",
        '            self._send_abort(request, "stop_string", output.choice)\n',
        "            pass\n",
        "The engine computes up to max_tokens for answers that a stop string has ended.",
        ("tests/api_server/test_completion_choices.py", "tests/api_server/test_streams.py"),
    ),
    Fault(
        "abort_not_sent_on_disconnect",
        "api_server/stream.py",
        "        running = [choice for choice in stream.choices if not choice.finished]\n"
        "        self.client.abort_request(stream)\n",
        "        running = [choice for choice in stream.choices if not choice.finished]\n",
        "The engine keeps computing for clients that have disconnected.",
        ("tests/api_server/test_streams.py", "tests/api_server/test_stream_failures.py"),
    ),
    Fault(
        "usage_counts_the_prompt_per_choice",
        "api_server/stream.py",
        "sum(len(stream.prompt_token_ids) for stream in self.streams),",
        "sum(len(stream.prompt_token_ids) * stream.num_choices for stream in self.streams),",
        "A client is charged for its prompt once for each of its n choices.",
        ("tests/api_server/test_completion_choices.py", "tests/api_server/test_completions.py"),
    ),
    Fault(
        "usage_counts_tokens_twice",
        "api_server/request_stream.py",
        "return sum(len(choice.token_ids) for choice in self.choices)",
        "return sum(2 * len(choice.token_ids) for choice in self.choices)",
        "completion_tokens in the usage is twice the number of tokens.",
        ("tests/api_server/test_completions.py",),
    ),
    Fault(
        "resumption_repeats_tokens",
        "api_server/request_stream.py",
        "return min(have - output.token_index, len(output.new_token_ids))",
        "return 0",
        "After a restart of the engine a client gets some tokens a second time.",
        ("tests/api_server/test_request_stream.py", "tests/api_server/test_engine_restart.py"),
    ),
    Fault(
        "prompt_counted_again_after_a_restart",
        "api_server/request_stream.py",
        "        if not self.accepted:\n            self.accepted = True\n",
        "        if True:\n            self.accepted = True\n",
        "The metric vllm:prompt_tokens counts a prompt once more after each engine restart.",
        ("tests/api_server/test_engine_restart.py", "tests/api_server/test_metrics.py"),
    ),
    Fault(
        "engine_crash_not_counted",
        "api_server/engine/open_request.py",
        "self.crash_count += self.alone or self.crash_count < crashes_until_isolated",
        "self.crash_count += 0",
        "A request that kills the engine is sent to each next one and kills it as well.",
        ("tests/api_server/test_engine_restart.py",),
    ),
    Fault(
        "split_character_replaced",
        "api_server/text/detokenizer.py",
        "decoded = self._decoder.decode(self._tokens.raw(token_id))",
        "decoded = self._decoder.decode(self._tokens.raw(token_id), final=True)",
        "Emoji and rare characters that take several tokens arrive as U+FFFD.",
        ("tests/api_server/test_detokenizer.py",),
    ),
    Fault(
        "tool_arguments_cut",
        "api_server/protocol/chat.py",
        'calls[-1]["function"]["arguments"] += part.text',
        'calls[-1]["function"]["arguments"] = part.text[:-1]',
        "The arguments of a streamed tool call are no JSON: their last character is missing.",
        ("tests/api_server/tools",),
    ),
    Fault(
        "finish_reason_stop_after_tool_calls",
        "api_server/parsers/output.py",
        "        if not self.has_tool_calls:\n            self.has_tool_calls",
        "        if True:\n            self.has_tool_calls",
        "A streamed answer that calls a tool ends with finish_reason stop, so no tool is run.",
        ("tests/api_server/tools", "tests/api_server/test_stream_equivalence.py"),
    ),
    Fault(
        "seed_ignored",
        "api_server/request_builder.py",
        "return next(self._app_state.seeds) if seed is None else seed & SEED_MASK",
        "return next(self._app_state.seeds)",
        "Two requests with the same seed get different answers.",
        ("tests/api_server/test_parameters.py", "tests/api_server/test_completions.py"),
    ),
    Fault(
        "api_key_compared_as_prefix",
        "api_server/http/middleware.py",
        "if hmac.compare_digest(given, key.key)]",
        "if key.key.startswith(given)]",
        "The first characters of an API key let a client in.",
        ("tests/api_server/test_api_key.py",),
    ),
    Fault(
        "browser_may_call_admin_routes",
        "api_server/routes/common.py",
        "if not is_loopback(address) or any(name in request.headers for name in _REMOTE_HEADERS):",
        "if not is_loopback(address):",
        "Any web page that an operator opens can pause the server.",
        ("tests/api_server/test_admin.py", "tests/api_server/test_api_key.py"),
    ),
    Fault(
        "body_limit_ignored_without_length",
        "api_server/routes/common.py",
        "                if len(body) > MAX_BODY_BYTES:\n",
        "                if content_length and len(body) > MAX_BODY_BYTES:\n",
        "A chunked upload fills the memory of the front end.",
        ("tests/api_server/test_bad_bodies.py", "tests/api_server/test_limits.py"),
    ),
    Fault(
        "drain_takes_new_requests",
        "api_server/http/middleware.py",
        "        elif app_state.health.draining:\n",
        "        elif False:\n",
        "A daemon that drains accepts new requests and aborts them at its timeout.",
        ("tests/api_server/test_drain.py",),
    ),
    Fault(
        "slow_reader_never_ended",
        "api_server/request_stream.py",
        "if self.is_blocked and self.num_bytes > self._limit:",
        "if False:",
        "A client that does not read its stream fills the memory of the front end.",
        ("tests/api_server/test_slow_clients.py",),
    ),
    Fault(
        "restarts_added_up_over_front_ends",
        "api_server/metrics/metric_sheet.py",
        "return max(row[0] for row in self._sheet.cells_by_row(self._cell, 1))",
        "return sum(row[0] for row in self._sheet.cells_by_row(self._cell, 1))",
        "With several front ends tokend:restarts counts each restart several times.",
        ("tests/api_server/test_metric_sheet.py",),
    ),
    Fault(
        "client_key_is_an_operators",
        "api_server/http/middleware.py",
        'state["is_operator"] = any(key.operator for key in known)',
        'state["is_operator"] = bool(known)',
        "Every client with a key can pause the server and abort requests of others.",
        ("tests/api_server/test_api_key.py",),
    ),
    Fault(
        "readiness_ignores_the_supervisor",
        "api_server/lifecycle/health.py",
        "return [*self._local_reasons(), *reported_reasons]",
        "return self._local_reasons()",
        "A load balancer sends requests to a daemon whose worker hangs.",
        ("tests/api_server/test_system.py",),
    ),
)

DEPLOY = (
    Fault(
        "restart_not_counted",
        "deploy/supervisor/recovery.py",
        "        self._num_restarts += 1\n",
        "        self._num_restarts += 0\n",
        "A daemon whose worker dies at each start restarts it for ever instead of ending.",
        ("tests/deploy/test_recovery.py", "tests/deploy/test_parts.py"),
    ),
    Fault(
        "heartbeat_of_dead_workers_renews_the_budget",
        "deploy/supervisor/recovery.py",
        "            if message.worker_epoch == self._epochs.worker_epoch:\n"
        "                self._budget.reset()\n",
        "            self._budget.reset()\n",
        "A daemon whose new workers die at once restarts them for ever.",
        ("tests/deploy/test_recovery.py",),
    ),
    Fault(
        "hung_worker_not_found",
        "deploy/supervisor/hang_detector.py",
        "                owes = index in report.awaits\n",
        "                owes = False\n",
        "A worker that hangs is never killed, and every request waits for ever.",
        ("tests/deploy/test_hang_detector.py",),
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
        "deploy/models/fetch.py",
        "    if digest.hexdigest() != model.sha256:\n",
        "    if False:\n",
        "A model file that was tampered with on its way is loaded.",
        ("tests/deploy/test_fetch.py",),
    ),
    Fault(
        "drain_does_not_wait",
        "deploy/supervisor/shutdown.py",
        "all_finished = all(number == 0 for number in self._num_open.values())",
        "all_finished = not any(self._num_open.values())",
        "A drain aborts requests at once, before the front ends have reported open ones.",
        ("tests/deploy/test_draining.py",),
    ),
    Fault(
        "stubborn_process_not_killed",
        "deploy/supervisor/shutdown.py",
        "(begin + limits.until_kill, signal.SIGKILL),",
        "(begin + limits.until_kill, signal.SIGTERM),",
        "The daemon never ends when one of its processes ignores SIGTERM.",
        ("tests/deploy/test_supervisor.py",),
    ),
    Fault(
        "gguf_rope_scaling_lost",
        "deploy/models/gguf_file.py",
        '    return {**rope, "rope_type": kind, **given}\n',
        "    return rope\n",
        "A GGUF model with scaled positions answers nonsense beyond its first context.",
        ("tests/deploy/test_prepare.py",),
    ),
)

FAULTS = (*PROTO, *KV_CACHE, *SCHEDULER, *WORKER, *API_SERVER, *DEPLOY)
