"""Every parameter of OpenAI's API and what becomes of it here; docs/openai.md prints the tables.

None is ignored: a parameter is acted on, written to the log where that is its purpose, taken when
it asks for what happens anyway, or refused with a 400 that says so.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, Final

from vlm_worker.gateway.api.fields import Fields


class Support(enum.StrEnum):
    """What becomes of a parameter."""

    SUPPORTED = "supported"
    LOGGED = "logged"
    NEUTRAL = "neutral value only"
    REFUSED = "refused"


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """One row of the table. `neutral` are the values that ask for what happens anyway."""

    name: str
    support: Support
    note: str
    neutral: tuple[Any, ...] = ()


def _supported(name: str, note: str) -> Parameter:
    return Parameter(name, Support.SUPPORTED, note)


def _logged(name: str, note: str) -> Parameter:
    return Parameter(name, Support.LOGGED, note)


def _neutral(name: str, note: str, *values: Any) -> Parameter:
    return Parameter(name, Support.NEUTRAL, note, values)


def _refused(name: str, note: str) -> Parameter:
    return Parameter(name, Support.REFUSED, note)


_SHARED: Final = (
    _supported("model", "required: the served name; any other is 404 `model_not_found`"),
    _supported("temperature", "0 to 2, 0 is greedy; default: the model's `generation_config.json`"),
    _supported("top_p", "0 to 1, 0 is greedy; default: the model's `generation_config.json`"),
    _supported("seed", "-2^63 to 2^63-1; the same seed gives the same answer, on any pod"),
    _supported("stop", "a string or up to 4 of 1 to 256 characters; found across token borders"),
    _supported("stream", "server-sent events"),
    _supported("stream_options", "`include_usage`; only with `stream`"),
    _supported("n", "1 to 8 choices; each draws by its own seed, made from the request's"),
    _supported("frequency_penalty", "-2 to 2, for each time that the answer holds a token"),
    _supported("presence_penalty", "-2 to 2, for a token that the answer holds"),
    _supported("logit_bias", "up to 1024 pairs: token id to a number from -100 to 100"),
    _logged("user", "up to 256 characters; written to the log, used for nothing else"),
)

CHAT: Final = (
    _supported(
        "messages",
        "required: roles system, developer (as system), user, assistant; see the parts below",
    ),
    _supported("max_completion_tokens", "1 to the context; default: what the context leaves"),
    _supported("max_tokens", "the older name of `max_completion_tokens`; both only if they agree"),
    *_SHARED,
    _logged("safety_identifier", "up to 64 characters; written to the log, used for nothing else"),
    _logged(
        "metadata", "up to 16 pairs, keys to 64 and values to 512 characters; written to the log"
    ),
    _supported("logprobs", "of the answer's tokens; see below"),
    _supported("top_logprobs", "0 to 20; only with `logprobs`"),
    _neutral("modalities", "answers are text", ["text"]),
    _neutral("response_format", "constrained output is not built", {"type": "text"}),
    _neutral("service_tier", "there is one tier", "auto", "default"),
    _neutral("store", "nothing is stored", False),
    _refused("audio", "answers are text"),
    _refused("function_call", "tools are not built"),
    _refused("functions", "tools are not built"),
    _refused("moderation", "moderation is not built"),
    _refused("parallel_tool_calls", "tools are not built"),
    _refused("prediction", "predicted output is not built"),
    _refused("prompt_cache_key", "caches are keyed by content and tenant, never by the client"),
    _refused("prompt_cache_options", "caches are keyed by content and tenant, never by the client"),
    _refused("prompt_cache_retention", "caches keep what fits"),
    _refused("reasoning_effort", "the model has no such setting"),
    _refused("tool_choice", "tools are not built"),
    _refused("tools", "tools are not built"),
    _refused("verbosity", "the model has no such setting"),
    _refused("web_search_options", "nothing is fetched from the web"),
)

COMPLETION: Final = (
    _supported("prompt", "required: one string, or an array of one"),
    _supported("max_tokens", "1 to the context; default: 16, as with OpenAI"),
    *_SHARED,
    _supported("logprobs", "0 to 20 likeliest tokens beside each of the answer's; see below"),
    _supported("best_of", "the same as `n`: every choice is returned"),
    _neutral("echo", "the prompt is not repeated", False),
    _refused("suffix", "the model completes, it does not fill in"),
)

# Not OpenAI's: what vLLM's clients send in `extra_body`, to both endpoints.
EXTRA: Final = (
    _supported("top_k", "tokens to choose from; 0 or -1: all; default: `generation_config.json`"),
    _supported("min_p", "0 to 1: the least probability, as a share of the likeliest token's"),
    _supported(
        "repetition_penalty",
        "0.01 to 10, for tokens of prompt and answer; default: `generation_config.json`",
    ),
    _supported("ignore_eos", "go on to `max_tokens`, past the model's end of the answer"),
    _supported(
        "priority",
        "0 to 1000, 0 by default: a smaller one goes first; "
        "from -1000 where the gateway runs with `--client-priority=any`",
    ),
    _refused("min_tokens", "an answer may end at its first token; `ignore_eos` is taken"),
    _refused("stop_token_ids", "answers end by text: send `stop`"),
    _refused("bad_words", "send a `logit_bias` of -100"),
    _refused("prompt_logprobs", "`logprobs` are of the answer"),
    _refused("guided_json", "constrained output is not built"),
    _refused("guided_regex", "constrained output is not built"),
    _refused("guided_choice", "constrained output is not built"),
    _refused("structured_outputs", "constrained output is not built"),
)

# Fields of a message, by OpenAI's client; what is not listed for a role is unknown there.
MESSAGE: Final = (
    _supported("role", "system, developer, user or assistant; tool and function are refused"),
    _supported("content", "a string, or parts: `text` in any role, `image_url` in user messages"),
    _refused("name", "the chat template knows no names"),
    _neutral("annotations", "an answer's own field, given back", []),
    _refused("audio", "audio is not built"),
    _refused("function_call", "tools are not built"),
    _refused("refusal", "the model has no refusals"),
    _refused("tool_call_id", "tools are not built"),
    _refused("tool_calls", "tools are not built"),
)


def refuse(fields: Fields, table: Sequence[Parameter]) -> None:
    """Take from an object what is refused, or neutral; raises ApiError for the former."""
    for row in table:
        if row.support in (Support.NEUTRAL, Support.REFUSED):
            fields.only(row.name, row.neutral, f"{row.note}.")
