"""An answer on its way from the engine to the wire, to its last word."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from vlm_worker.engine.events import EventStream, PrefillEvent
from vlm_worker.errors import EngineError
from vlm_worker.roles.times import CallClock
from vlm_worker.types import FailedEvent, FinishedEvent, StageSpan, TokenEvent
from vlm_worker.wire.calls import DecodeCall, DecodeEvent, Finished, Reply, Tokens
from vlm_worker.wire.frames import Commit


def ended_by_first_token(
    call: DecodeCall, commit: Commit, spans: tuple[StageSpan, ...], clock: CallClock
) -> Reply[DecodeEvent]:
    """The first token, which the gateway has from prefill, was the last."""
    assert commit.finish_reason is not None
    num_tokens = call.request.num_delivered_tokens + 1
    return Reply(Finished(commit.finish_reason, num_tokens), spans, clock.now())


async def answer_of(stream: EventStream[PrefillEvent]) -> AsyncGenerator[Tokens | Finished]:
    """The engine's events as the wire has them, to the last word."""
    async for event in stream:
        match event:
            case TokenEvent(index, token_id, logprobs=logprobs):
                yield Tokens(index, (token_id,), () if logprobs is None else (logprobs,))
            case FinishedEvent(reason, num_tokens):
                yield Finished(reason, num_tokens)
                return
            case FailedEvent(error):
                raise error
    raise EngineError("the engine ended the answer without a last word")
