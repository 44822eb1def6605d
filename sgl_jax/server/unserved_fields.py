"""Fields of OpenAI's, Anthropic's and SGLang's requests that are recognized but not applied.

Every field of a body has one of three classes:

- *applied*: the bodies' models have it;
- *accepted without effect*: none of its values changes an answer. `--strict-fields` refuses it;
- *refused*: it would change the answer, and is not supported. Clients, benches and routers send
  many such fields without requesting anything, so null, false, 0 and empty values, and lists of
  these, are accepted. `_ALLOWED` lists fields with other values that request nothing.

A null counts as not given. A field in none of these classes is refused as unknown.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.request_limits import MAX_REQUESTS_PER_CALL

# Values that request nothing, for the exceptions from the rule.
_ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "beam_width": (1,),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "include": ("reasoning.encrypted_content",),  # reasoning is sent and accepted as text
    "length_penalty": (1.0,),
    "log_metrics": (True,),
    "modalities": ("text",),
    "speed": ("standard",),
    "stream_output": (True,),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
    "web_search_options": (),  # an empty object requests a search
}


STRICT = "strict fields"  # validation context that refuses fields without effect


class Unserved(NamedTuple):
    is_refused: bool
    reason: str  # for having no effect or being refused


UnservedFields = Mapping[str, Unserved]


def check_unserved(name: str, value: Any, field: Unserved, *, is_strict: bool) -> None:
    """Raise `InvalidRequestError` if `value` requests an unsupported feature.

    With `is_strict`, a field without effect must be null.
    """
    if not field.is_refused:
        if is_strict and value is not None:
            raise InvalidRequestError(without_effect(name), name)
        return
    if isinstance(value, list) and len(value) > MAX_REQUESTS_PER_CALL:
        raise InvalidRequestError(
            f"{name}: a list has one entry for each prompt, at most {MAX_REQUESTS_PER_CALL}, "
            f"got {len(value)}",
            name,
        )
    if not _requests_nothing(value, _ALLOWED.get(name)):
        raise InvalidRequestError(f"{name}: {field.reason}; {advice(name)}", name)


def without_effect(name: str) -> str:
    return f"{name}: it has no effect here, and this server has --strict-fields; leave it out"


def advice(name: str) -> str:
    """Return the values that a client may send in an unserved field."""
    values = " or ".join(map(as_json, _ALLOWED.get(name, ())))
    return f"leave it out or send {values}" if values else "leave it out"


def as_json(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace("'", '"')


def _requests_nothing(value: Any, allowed: tuple[Any, ...] | None) -> bool:
    if isinstance(value, list):  # one entry per prompt
        is_flat = not any(isinstance(each, (list, dict)) for each in value)
        return is_flat and all(_requests_nothing(each, allowed) for each in value)
    if allowed is None or value is None:
        return not value
    # Python's True equals 1.
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed
    )


def _table(accepted: Mapping[str, str], refused: Mapping[str, str]) -> UnservedFields:
    return {
        name: Unserved(is_refused, reason)
        for is_refused, group in ((False, accepted), (True, refused))
        for reason, names in group.items()
        for name in names.split()
    }


REQUEST = _table(
    {
        "a label": "metadata safety_identifier custom_labels client_metadata user_profile_id "
        "workspace_id conversation_id session_id service_tier inference_geo betas diagnostics",
        "a trace or log of the client": "external_trace_header received_time no_logs",
        "a hint for caches, routers or speculation": "prompt_cache_options routing_key "
        "kv_router_hint prediction",
        "answers are not kept": "store",
        "the form of a stream": "stream_options stream_interval stream_reasoning "
        "separate_reasoning",
        "text is as the tokenizer joins it": "spaces_between_special_tokens",
        "it goes with a field that is refused": "return_flat_raw_top_logprobs_b64",
        "it is between SGLang's own processes": "is_single batch_size abort_message",
    },
    {
        "every request is counted in the metrics": "log_metrics",
        "the model decides": "require_reasoning",
        "reasoning cannot be bounded": "max_thinking_tokens thinking task",
        "there are no background responses": "background background_options",
        "the step does not report it": "return_indexer_topk return_entropy return_bytes "
        "return_sampling_mask sampling_logprobs_mode",
        "it comes from /generate": "return_routed_experts routed_experts_start_len "
        "return_hidden_states",
        "log-probabilities come in nested lists only": "return_flat_raw_top_logprobs "
        "return_flat_raw_output_top_logprobs",
        "answers have no such details": "return_cached_tokens_details return_spec_tokens_details "
        "return_input_ids_in_sglext return_output_ids_in_sglext include return_meta_info",
        "there are no adapters": "lora_path lora_id",
        "clients cannot bring code": "custom_logit_processor chat_template",
        "it is for code of clients, or for the ids of tokens that top_p keeps, which no step "
        "reports": "custom_params",
        "there are no watermarks": "watermark",
        "prefill and decode share a server here": "bootstrap_host bootstrap_port bootstrap_room "
        "bootstrap_pair_key decode_tp_size disagg_prefill_dp_rank disagg_transfer_id",
        "it is SGLang's own": "http_worker_ipc finished_reason weight_versions",
        "there is only text": "image_data video_data audio_data mm_hashes mm_content_hashes "
        "images_config video_config mm_processor_kwargs max_dynamic_patch min_dynamic_patch "
        "image_max_dynamic_patch video_max_dynamic_patch need_wait_for_mm_inputs "
        "num_items_assigned encoder_urls use_audio_in_video modalities audio image",
        "a grammar is of the output alone": "ebnf_full_assistant",
        "output stops at strings and token ids only": "stop_regex",
        "it is no_stop_trim here": "include_stop_str_in_output",
        "there is no beam search": "use_beam_search early_stopping beam_width length_penalty",
        "send n": "best_of",
        "it is return_logprob of the body": "logprobs prompt_logprobs",
        "log-probabilities come from /v1/chat/completions": "top_logprobs",
        "prompts are tokens": "input_embeds positional_embed_overrides",
        "there is no scoring of items": "multi_item_delimiter_indices token_indices_to_pool",
        "there is no such service": "moderation container mcp_servers context_management "
        "access_programs web_search_options",
        "events have only new text": "stream_output",
        "it is tools now": "functions",
        "it is tool_choice now": "function_call",
        "templates have no such setting": "verbosity",
        "the prompt is made of messages; see /v1/completions": "input_ids",
        "it is session_id in a chat": "session_params",
        "text is only continued": "suffix",
        "it is return_token_ids here": "return_prompt_token_ids",
        "a prompt that is too long is refused": "truncation",
        "the server runs no tools": "max_tool_calls",
        "a conversation goes on by previous_response_id": "conversation",
        "no prompts are kept": "prompt",
        "no messages are kept": "thread",
        "there is one speed": "speed",
        "it is format of output_config now": "output_format",
    },
)
AGENT_HINTS = _table({"a label": "workflow_id step_id parent_step_id"}, {})
# Messages, their parts and tools. Clients send back parts of answers.
PART = _table(
    {
        "part of an answer, sent back": "id index status phase annotations logprobs summary "
        "encrypted_content signature citations parsed_output caller namespace context "
        "provider_specific_fields",
        "a hint for caches": "cache_control",
        "a result is text in either case": "is_error",
        "reasoning is whole, and not bounded": "generate_summary display budget_tokens mode",
        "tools are called by the client alone": "async allowed_callers output_schema toolset_name "
        "input_examples",
        "the form of a stream": "eager_input_streaming",
        "all tools are sent at once": "defer_loading",
    },
    {
        "there is only text": "refusal audio",
        "it is tool_calls now": "function_call",
        "tools belong in the top-level field": "tools",
        "use continue_final_message": "prefix",
        "events are not padded": "include_obfuscation",
        "templates have no such setting": "verbosity",
        "there is no such service": "task_budget",
    },
)
