"""Fields of OpenAI's and SGLang's requests that this server knows and does not serve.

Clients, benches and routers send many of them at the value that asks for nothing. That value is
taken, any other is refused by name; some fields (labels, accounting, hints) may say anything,
because they cannot change an answer of this server. `docs/reference/request_fields.md` is made
from these tables and from the bodies that refer to them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.request_limits import MAX_REQUESTS_PER_CALL

# What stands for "nothing" in fields that hold texts, ids, media or settings.
NOTHING: tuple[Any, ...] = ("", [], {})


class UnservedField(NamedTuple):
    """A field and the values that may be sent beside null.

    A list may hold one for each prompt; not in a message, of which there are many, without prompts.
    """

    name: str
    allowed: tuple[Any, ...] | None  # None: any value
    reason: str  # what is not there, or why the value does not matter
    may_be_listed: bool = True

    def check(self, value: Any) -> None:
        """Raise `InvalidRequestError` if `value` asks for what is not there."""
        if self.allowed is None:
            return
        each = value if isinstance(value, list) and self.may_be_listed else [value]
        if len(each) > MAX_REQUESTS_PER_CALL:
            raise InvalidRequestError(
                f"{self.name}: a list has one entry for each prompt, at most "
                f"{MAX_REQUESTS_PER_CALL}, got {len(each)}",
                self.name,
            )
        if all(map(self._asks_nothing, each)):
            return
        raise InvalidRequestError(f"{self.name}: {self.reason}; {self.advice}", self.name)

    @property
    def advice(self) -> str:
        """What may be sent."""
        if not self.allowed or self.allowed == NOTHING:
            return "leave it out"
        return f"leave it out or send {' or '.join(map(as_json, self.allowed))}"

    @property
    def schema(self) -> dict[str, Any]:
        """Its JSON schema."""
        if self.allowed is None:
            return {"description": f"without effect: {self.reason}"}
        values = {"enum": [None, *self.allowed]}
        lists = {"type": "array", "items": values, "maxItems": MAX_REQUESTS_PER_CALL}
        is_listed = self.allowed and self.may_be_listed
        return {"description": self.reason, "anyOf": [values, lists] if is_listed else [values]}

    def _asks_nothing(self, value: Any) -> bool:
        assert self.allowed is not None
        # Python's True equals 1: of a field's values all are booleans, or none is.
        return value is None or (
            value in self.allowed and isinstance(value, bool) == isinstance(self.allowed[0], bool)
        )


Fields = Mapping[str, UnservedField]


def as_json(value: Any) -> str:
    """A value of `allowed` as clients write it."""
    return str(value).lower() if isinstance(value, bool) else str(value).replace("'", '"')


def _fields(names: str, allowed: tuple[Any, ...] | None, reason: str) -> Fields:
    return {name: UnservedField(name, allowed, reason) for name in names.split()}


def _unlisted(fields: Fields) -> Fields:
    """The same where there are no prompts to have one entry each."""
    return {name: field._replace(may_be_listed=False) for name, field in fields.items()}


# OpenAI's accounting.
_ACCOUNTING = _fields(
    "metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "prompt_cache_options",
    None,
    "it is for the accounting of a hosted service",
)

# Of any generating request of SGLang, sglang-jax or their router.
_SGLANG = {
    **_fields(
        "custom_labels routing_key conversation_id external_trace_header received_time "
        "kv_hints kv_router_hint",
        None,
        "it is for routers, labels and traces",
    ),
    **_fields("no_logs", None, "logs never hold the text or the tokens of a request"),
    **_fields("log_metrics", (True,), "every request is counted in the metrics"),
    **_fields("stream_reasoning", None, "in a stream all of an answer comes as it is made"),
    **_fields("require_reasoning", (False,), "the model decides"),
    **_fields("max_thinking_tokens thinking task", NOTHING, "reasoning cannot be bounded"),
    **_fields("background", (False,), "there are no background responses"),
    **_fields(
        "return_hidden_states return_routed_experts return_indexer_topk return_entropy "
        "return_bytes return_sampling_mask",
        (False,),
        "the step does not report it",
    ),
    **_fields("routed_experts_start_len", (0,), "routed experts are not reported"),
    **_fields("sampling_logprobs_mode", NOTHING, "the step does not report it"),
    **_fields(
        "return_flat_raw_top_logprobs return_flat_raw_output_top_logprobs",
        (False,),
        "log-probabilities come in nested lists only",
    ),
    **_fields("return_flat_raw_top_logprobs_b64", None, "it needs return_flat_raw_top_logprobs"),
    **_fields(
        "return_cached_tokens_details return_spec_tokens_details return_input_ids_in_sglext "
        "return_output_ids_in_sglext",
        (False,),
        "answers have no such details",
    ),
    **_fields("lora_path lora_id", NOTHING, "there are no adapters"),
    **_fields("custom_logit_processor", NOTHING, "clients cannot bring code"),
    **_fields("watermark", NOTHING, "there are no watermarks"),
    **_fields(
        "bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size "
        "disagg_prefill_dp_rank disagg_transfer_id",
        NOTHING,
        "prefill and decode are not apart here",
    ),
    **_fields("http_worker_ipc", NOTHING, "it is SGLang's own, between its processes"),
}

_MEDIA = {
    **_fields(
        "image_data video_data audio_data mm_hashes mm_content_hashes images_config video_config "
        "mm_processor_kwargs max_dynamic_patch min_dynamic_patch image_max_dynamic_patch "
        "video_max_dynamic_patch need_wait_for_mm_inputs num_items_assigned encoder_urls",
        NOTHING,
        "there is only text",
    ),
    **_fields("use_audio_in_video", (False,), "there is only text"),
    **_fields("modalities", ("text",), "there is only text"),
}

_REQUEST: Fields = {**_SGLANG, **_MEDIA}

# Among sampling parameters: in the body of OpenAI's routes, under `sampling_params` in /generate.
SAMPLING: Fields = {
    **_fields("ebnf_full_assistant", (False,), "a grammar is of the output alone"),
    **_fields("stop_regex", NOTHING, "output stops at strings and token ids only"),
    **_fields("custom_params", NOTHING, "clients cannot bring code"),
    **_fields("spaces_between_special_tokens", None, "decoding adds no spaces"),
    **_fields("stream_interval", None, "events come as fast as they are read"),
    **_fields("include_stop_str_in_output", (False,), "it is no_stop_trim here"),
    **_fields("use_beam_search early_stopping", (False,), "there is no beam search"),
    **_fields("beam_width", (1,), "there is no beam search"),
    **_fields("length_penalty", (1.0,), "there is no beam search"),
    **_fields("watermark", NOTHING, "there are no watermarks"),
}

NATIVE_SAMPLING: Fields = {
    **SAMPLING,
    **_fields("best_of", (1,), "ask for n answers"),
    **_fields("logprobs prompt_logprobs", NOTHING, "it is return_logprob of the body"),
}

# Chats have parsers, so there they mean something.
_UNPARSED = _fields("separate_reasoning", None, "only chats tell reasoning from content")

GENERATE: Fields = {
    **_REQUEST,
    **_UNPARSED,
    **_fields("session_id", None, "it is for routers; session_params names a session"),
    **_fields("is_single batch_size", None, "it is SGLang's own, and counted here"),
    **_fields("return_meta_info", None, "every answer has it"),
    **_fields("input_embeds positional_embed_overrides", NOTHING, "prompts are tokens"),
    **_fields(
        "multi_item_delimiter_indices token_indices_to_pool",
        NOTHING,
        "there is no scoring of items",
    ),
}

_OPENAI: Fields = {
    **_ACCOUNTING,
    **_REQUEST,
    **SAMPLING,
    **_fields("moderation", NOTHING, "there is no moderation"),
    **_fields("stream_output", (True,), "events have only what is new"),
}

CHAT: Fields = {
    **_OPENAI,
    **_fields("functions", NOTHING, "it is tools now"),
    **_fields("function_call", ("none", "auto"), "it is tool_choice now"),
    **_fields("audio", NOTHING, "there is only text"),
    **_fields("prediction", None, "it is a hint"),
    **_fields("best_of", (1,), "ask for n answers"),
    **_fields("verbosity", ("medium",), "the model cannot be told"),
    **_fields("web_search_options", (), "there is no web search"),
    **_fields("input_ids", NOTHING, "the prompt is made of messages; see /v1/completions"),
    **_fields("session_params", NOTHING, "it is session_id in a chat"),
}

COMPLETION: Fields = {
    **_OPENAI,
    **_UNPARSED,
    **_fields("suffix", NOTHING, "text is only continued"),
    **_fields("return_prompt_token_ids", (False,), "it is return_token_ids here"),
    **_fields("return_meta_info", (False,), "answers have usage and finish_reason"),
    **_fields("session_id", None, "it is for routers; session_params names a session"),
}

# Clients send back what they put together from a stream.
TOOL_CALL: Fields = _fields("index", None, "calls are in order")

# Of a message: part of what answers hold, so clients send them back.
_MESSAGE: Fields = {
    **_fields("refusal audio", NOTHING, "there is only text"),
    **_fields("annotations", NOTHING, "there are no annotations"),
    **_fields("function_call", NOTHING, "it is tool_calls now"),
    **_fields("tools", NOTHING, "tools stand beside the messages"),
    **_fields("prefix", (False,), "use continue_final_message"),
    **_fields("phase provider_specific_fields", None, "templates do not know it"),
}
MESSAGE: Fields = _unlisted(_MESSAGE)

ABORT: Fields = {
    **_fields("abort_message", None, "the message is this server's own"),
    **_fields("finished_reason weight_versions http_worker_ipc", NOTHING, "it is SGLang's own"),
}

TOKENIZE: Fields = {
    **_fields("chat_template", NOTHING, "clients cannot bring programs"),
    **_fields("mm_processor_kwargs", NOTHING, "there is only text"),
}

STREAM_OPTIONS: Fields = _fields("include_obfuscation", (False,), "events are not padded")

# Of OpenAI's Responses API.
_HOSTED = {name: field for name, field in _ACCOUNTING.items() if name not in ("store", "metadata")}
RESPONSES: Fields = {
    **_HOSTED,
    **_REQUEST,
    **_fields("include", NOTHING, "answers have all that there is"),
    **_fields("truncation", ("disabled",), "what is too long is refused"),
    **_fields("top_logprobs", (0,), "log-probabilities are told by /v1/chat/completions"),
    **_fields("stream_options", None, "events are not padded, and the last has the usage"),
    **_fields("max_tool_calls", NOTHING, "there are no tools of the server's own"),
    **_fields("conversation", NOTHING, "a conversation goes on by previous_response_id"),
    **_fields("prompt", NOTHING, "no prompts are kept"),
    **_fields("background_options", NOTHING, "there are no background responses"),
    **_fields("context_management access_programs moderation", NOTHING, "there is no such service"),
    **_fields("image", NOTHING, "there is only text"),
}
RESPONSE_ITEM: Fields = _unlisted(
    _fields("id status phase async caller namespace", None, "templates do not know it")
)
RESPONSE_TEXT: Fields = _unlisted(_fields("annotations logprobs", None, "templates do not know it"))
RESPONSE_REASONING: Fields = {
    **RESPONSE_ITEM,
    **_unlisted(_fields("summary encrypted_content", None, "templates do not know it")),
}
RESPONSE_TEXT_OPTIONS: Fields = _fields("verbosity", ("medium",), "the model cannot be told")
RESPONSE_REASONING_OPTIONS: Fields = _fields(
    "summary generate_summary mode context", None, "reasoning is told as it is"
)
RESPONSE_TOOL: Fields = {
    **_fields("defer_loading async", (False,), "all tools are told of at once"),
    **_fields("allowed_callers output_schema", None, "templates do not know it"),
}

# Of Anthropic's Messages API.
MESSAGES: Fields = {
    **_fields(
        "service_tier inference_geo user_profile_id workspace_id diagnostics betas",
        None,
        "it is for the accounting of a hosted service",
    ),
    **_fields("cache_control", None, "all prefixes are cached"),
    **_fields("speed", ("standard",), "there is one speed"),
    **_fields("container mcp_servers context_management", NOTHING, "there is no such service"),
    **_fields("output_format", NOTHING, "it is format of output_config now"),
}
MESSAGES_BLOCK: Fields = _unlisted(
    {
        **_fields("cache_control", None, "all prefixes are cached"),
        **_fields("caller toolset_name", None, "templates do not know it"),
    }
)
MESSAGES_TEXT: Fields = {
    **MESSAGES_BLOCK,
    **_unlisted(_fields("citations parsed_output", None, "templates do not know it")),
}
MESSAGES_THINKING: Fields = _unlisted(
    _fields("signature cache_control", None, "templates do not know it")
)
MESSAGES_TOOL_RESULT: Fields = {
    **MESSAGES_BLOCK,
    **_unlisted(_fields("is_error", None, "templates do not know it")),
}
MESSAGES_THINKING_OPTIONS: Fields = {
    **_fields("budget_tokens", None, "reasoning cannot be bounded apart from max_tokens"),
    **_fields("display", None, "reasoning is told as it is"),
}
MESSAGES_TOOL: Fields = {
    **_fields("cache_control", None, "all prefixes are cached"),
    **_fields("defer_loading", (False,), "all tools are told of at once"),
    **_fields(
        "eager_input_streaming input_examples allowed_callers", None, "templates do not know it"
    ),
}
MESSAGES_OUTPUT: Fields = _fields("task_budget", NOTHING, "there is no such service")
