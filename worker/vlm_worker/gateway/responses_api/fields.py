"""Tables of the parameters of `/v1/responses`. docs/openai.md prints them."""

from __future__ import annotations

import functools
from typing import Final

from vlm_worker.gateway.api.schema import EXTRA, Parameter, Support

_supported = functools.partial(Parameter, Support.SUPPORTED)
_logged = functools.partial(Parameter, Support.LOGGED)
_neutral = functools.partial(Parameter, Support.NEUTRAL)
_refused = functools.partial(Parameter, Support.REFUSED)

LOGPROBS: Final = "message.output_text.logprobs"
ENCRYPTED: Final = "reasoning.encrypted_content"

RESPONSES: Final = (
    _supported("input", "required: a string, or an array of items; see below"),
    _supported("instructions", "a system message before those of `input`"),
    _supported("max_output_tokens", "1 to the context; default: what the context leaves"),
    _supported("model", "required: the served name; any other is 404 `model_not_found`"),
    _supported("temperature", "as in a chat"),
    _supported("top_p", "as in a chat"),
    _supported("stream", "server-sent events, each with its `sequence_number`"),
    _supported("stream_options", "`include_obfuscation`: false; only with `stream`"),
    _supported("text", "`format`: `text`, `json_object` or `json_schema`; `verbosity`: `medium`"),
    _supported("tools", "up to 128 of type `function`; without `strict`, a tool is not strict"),
    _supported(
        "tool_choice", "`auto`, `none`, `required`, a named function, or `allowed_tools` of these"
    ),
    _supported("parallel_tool_calls", "`false`: the answer ends after its first call"),
    _supported(
        "reasoning",
        "`effort`: as `reasoning_effort` of a chat; `summary`, `generate_summary` and `context`: "
        "`auto`; `mode`: `standard`",
    ),
    _supported(
        "include",
        f"`{LOGPROBS}`, and `{ENCRYPTED}`: reasoning items have their text, so they can be sent "
        "back without it",
    ),
    _supported("top_logprobs", f"0 to 20; above 0 only with `include: [{LOGPROBS}]`"),
    _supported("prompt_cache_key", "as in a chat"),
    _logged("user", "up to 256 characters; written to the log, used for nothing else"),
    _logged("safety_identifier", "up to 64 characters; written to the log, used for nothing else"),
    _logged(
        "metadata", "up to 16 pairs, keys to 64 and values to 512 characters; written to the log"
    ),
    _neutral("store", "nothing is stored: send false, or leave it out", (False,)),
    _neutral("background", "an answer has a client that waits for it", (False,)),
    _neutral("truncation", "no item of the input is dropped", ("disabled",)),
    _neutral("service_tier", "there is one tier", ("auto", "default")),
    _refused("previous_response_id", "nothing is stored: send the earlier items in `input`"),
    _refused("conversation", "nothing is stored: send the earlier items in `input`"),
    _refused("prompt", "no prompts are stored: send `instructions` and `input`"),
    _refused("max_tool_calls", "it counts calls of hosted tools, and there are none"),
    _refused("access_programs", "there are none"),
    _refused("context_management", "the input is not compacted: send fewer items"),
    _refused("image", "images are shown as `detail` and `visual` ask"),
    _refused("moderation", "moderation is not built"),
    _refused("prompt_cache_options", "caches are keyed by content and tenant, never by the client"),
    _refused("prompt_cache_retention", "caches keep what fits"),
)

# Parameters of a chat that the Responses API does not have.
OF_CHAT: Final = (
    _supported("seed", "as in a chat"),
    _supported("stop", "as in a chat"),
    _supported("frequency_penalty", "as in a chat"),
    _supported("presence_penalty", "as in a chat"),
    _supported("logit_bias", "as in a chat"),
    _refused("messages", "send `input`"),
    _refused("max_tokens", "send `max_output_tokens`"),
    _refused("max_completion_tokens", "send `max_output_tokens`"),
    _refused("n", "a response has one answer: send several requests"),
    _refused("logprobs", f"send `include: [{LOGPROBS}]`"),
    _refused("response_format", "send `text.format`"),
    _refused("reasoning_effort", "send `reasoning.effort`"),
)

# Items of `input`, by type, and the fields that their items may have.
MESSAGE: Final = (
    _supported("role", "user, assistant, system or developer"),
    _supported("content", "a string, or an array of parts"),
    _supported("type", "`message`; it may be absent"),
    _supported("id", "of an answer, given back; it has no effect"),
    _supported("status", "of an answer, given back; it has no effect"),
    _refused("phase", "a message has no phase"),
)
FUNCTION_CALL: Final = (
    _supported("type", "`function_call`"),
    _supported("call_id", "the id that the output of the call names"),
    _supported("name", "the function"),
    _supported("arguments", "the text of a JSON object"),
    _supported("id", "of an answer, given back; it has no effect"),
    _supported("status", "of an answer, given back; it has no effect"),
    _neutral("async", "the model waits for the output", (False,)),
    _refused("caller", "only the model calls"),
    _refused("namespace", "tools have no namespaces"),
)
FUNCTION_CALL_OUTPUT: Final = (
    _supported("type", "`function_call_output`"),
    _supported("call_id", "required: the `call_id` of a `function_call` before it"),
    _supported("output", "a string, or an array of `input_text`"),
    _supported("id", "it has no effect"),
    _supported("status", "it has no effect"),
    _refused("name", "`call_id` names the call"),
    _refused("caller", "only the model calls"),
    _refused("namespace", "tools have no namespaces"),
)
REASONING: Final = (
    _supported("type", "`reasoning`"),
    _supported("content", "its texts become `reasoning_content` of the assistant's message"),
    _supported("id", "of an answer, given back; it has no effect"),
    _supported("status", "of an answer, given back; it has no effect"),
    _neutral("summary", "the model reads its reasoning, not a summary: send `content`", ([],)),
    _refused("encrypted_content", "it cannot be read here: send `content`, or leave the item out"),
)
FUNCTION_TOOL: Final = (
    _supported("type", "`function`; hosted and custom tools are refused"),
    _supported("name", "required: 1 to 64 letters, digits, `_` and `-`"),
    _supported("description", "up to 64 Ki characters"),
    _supported("parameters", "a JSON schema of an object"),
    _supported("strict", "true: arguments keep the schema; absent or null counts as false"),
    _neutral("async", "the model waits for the output", (False,)),
    _neutral("allowed_callers", "only the model calls", (["direct"],)),
    _neutral("defer_loading", "the model sees all tools", (False,)),
    _refused("output_schema", "outputs are not checked"),
)

SAME: Final = (
    *("model", "temperature", "top_p", "stream", "prompt_cache_key"),
    *("user", "safety_identifier", "metadata"),
    *(row.name for row in OF_CHAT if row.support is Support.SUPPORTED),
    *(row.name for row in EXTRA),
)
"""Parameters that the chat has by the same name and with the same meaning."""
