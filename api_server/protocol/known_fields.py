"""Names of fields that the APIs which clients know define, beyond what is taken here.

Owns the lists, as data. A name in one of them is not a slip of the pen: whoever sends it
expects an effect. Names that are in none of them are ignored.
"""

from typing import Any, Final

Neutral = dict[str, tuple[Any, ...]]
"""Field → values, beside null, that ask for nothing."""

HARMLESS: Final = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})
"""Labels and hints: they cannot change an answer."""

OPENAI: Final = frozenset(
    {
        "audio",
        "background",
        "best_of",
        "conversation",
        "function_call",
        "functions",
        "include",
        "input",
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
        "modalities",
        "moderation",
        "parallel_tool_calls",
        "prediction",
        "previous_response_id",
        "prompt_cache_retention",
        "reasoning",
        "reasoning_effort",
        "service_tier",
        "store",
        "suffix",
        "text",
        "tool_choice",
        "tools",
        "truncation",
        "verbosity",
        "web_search_options",
    }
)
"""Of completions, chat completions and responses."""

ANTHROPIC: Final = frozenset(
    {
        "anthropic_beta",
        "anthropic_version",
        "cache_control",
        "container",
        "context_management",
        "max_tokens_to_sample",
        "mcp_servers",
        "output_config",
        "output_format",
        "stop_sequences",
        "system",
        "thinking",
    }
)
"""Of messages."""

VLLM: Final = frozenset(
    {
        "data_parallel_rank",
        "documents",
        "ec_transfer_params",
        "flat_logprobs",
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        "include_reasoning",
        "kv_transfer_params",
        "logits_processors",
        "media_io_kwargs",
        "mm_processor_kwargs",
        "output_kind",
        "prompt_embeds",
        "skip_reading_prefix_cache",
        "structural_tag",
        "thinking_token_budget",
        "vllm_xargs",
    }
)
"""Of completions and chat completions."""

ENDPOINTS: Final = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "echo",
        "max_completion_tokens",
        "messages",
        "prompt",
        "top_logprobs",
    }
)
"""Fields of one endpoint that mean nothing to the other."""

KNOWN: Final = OPENAI | ANTHROPIC | VLLM | ENDPOINTS

NEUTRAL: Final[Neutral] = {
    "best_of": (1,),
    "include_reasoning": (True,),
    "service_tier": ("auto", "default"),
    "skip_reading_prefix_cache": (False,),
    "store": (False,),
    "text": ({}, {"format": {"type": "text"}}),
    "truncation": ("disabled",),
    "vllm_xargs": ({},),
}
"""Of fields of both endpoints."""

COMPLETION_NEUTRAL: Final[Neutral] = {**NEUTRAL, "parallel_tool_calls": (True,)}

CHAT_NEUTRAL: Final[Neutral] = {
    **NEUTRAL,
    "add_special_tokens": (False,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
}

RESPONSES_NEUTRAL: Final[Neutral] = {
    "context_management": ([],),
    "service_tier": ("auto", "default"),
}

RESPONSES_HINTS: Final = frozenset(
    {"max_tool_calls", "prompt_cache_options", "prompt_cache_retention"}
)
"""Of /v1/responses: about a cache that is not ours, and tools that are not called here."""

REASONING_NEUTRAL: Final[Neutral] = {"context": ("auto",), "mode": ("standard",)}

STREAM_OPTIONS_NEUTRAL: Final[Neutral] = {"include_obfuscation": (False,)}

MESSAGES_NEUTRAL: Final[Neutral] = {
    "inference_geo": (),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
}
"""Of Anthropic's messages."""

MESSAGES_HINTS: Final = frozenset(
    {
        *("anthropic_beta", "anthropic_version", "betas", "context_management", "diagnostics"),
        *("fallbacks", "inference_geo", "user_profile_id"),
    }
)
"""Of Anthropic's messages: what changes no answer, or only how long a conversation may become."""

MESSAGE_NEUTRAL: Final[Neutral] = {
    "annotations": ([],),
    "audio": (),
    "cache_control": (),
    "function_call": (),
    "refusal": (),
}

PART_NEUTRAL: Final[Neutral] = {"cache_control": (), "prompt_cache_breakpoint": ()}

STRUCTURED_NEUTRAL: Final[Neutral] = {
    "disable_additional_properties": (False,),
    "disable_fallback": (False, True),
    "structural_tag": (),
    "whitespace_pattern": (),
}
