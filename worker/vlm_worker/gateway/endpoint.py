"""One request of chat completions, completions or responses, from its body to its last event.

A request ends when it is complete, its client leaves, its deadline passes, or the gateway drains.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from vlm_worker.abilities import TOLD
from vlm_worker.errors import InvalidImageError, WorkerError
from vlm_worker.gateway.access_log import Access
from vlm_worker.gateway.api import errors
from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.api.requests import Options
from vlm_worker.gateway.body import BodyBytes, Receive, read_body, timeout_of, until_disconnect
from vlm_worker.gateway.choices import Choices
from vlm_worker.gateway.context import GatewayContext
from vlm_worker.gateway.detokenization import TextAssembler
from vlm_worker.gateway.dialect import Dialect, Kind
from vlm_worker.gateway.http_response import ClientGoneError, Response, Send
from vlm_worker.gateway.images import RequestImage
from vlm_worker.gateway.memory import FullError, MemoryReservation
from vlm_worker.gateway.orchestrate.generation import (
    Generation,
    NoEncoderError,
    NoRouteError,
)
from vlm_worker.gateway.orchestrate.prepared_request import PreparedRequest
from vlm_worker.gateway.orchestrate.ttft_trace import Trace
from vlm_worker.gateway.orchestrate.wake import NotAwakeError
from vlm_worker.gateway.rate_limits import RateLimitError, RequestCharge
from vlm_worker.gateway.request_guard import Guard
from vlm_worker.gateway.responses import (
    ChatShape,
    CompletionShape,
    Envelope,
    ResponseWriter,
)
from vlm_worker.gateway.session_prefetch import EndedTurn
from vlm_worker.telemetry import REQUEST_ID, Span
from vlm_worker.types import Modality

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Exchange:
    """The content of a request's log line. Its endpoint call is the only writer."""

    request_id: str
    tenant: str
    client_request_id: str
    traceparent: str
    held: MemoryReservation
    dialect: Dialect
    arrived: float
    access: Access
    charge: RequestCharge
    outcome: str = "error"
    options: Options | None = None
    trace: Trace | None = None
    choices: Choices | None = None
    reason: str = ""


class Endpoint:
    """An ASGI application for one path.

    Attributes:
        needs_workers: its requests keep the pods of a service that would be idle without them.
    """

    needs_workers = True

    def __init__(
        self, context: GatewayContext, kind: Kind, dialect: type[Dialect] = Dialect
    ) -> None:
        self._context = context
        self._dialect = dialect
        self._kind = kind
        self._shape = ChatShape() if kind == "chat" else CompletionShape()
        self._operation = "chat" if kind == "chat" else "text_completion"

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Serve one request. It always ends with an answer or error, and with one log line."""
        state = scope["state"]
        exchange = Exchange(
            state["request_id"],
            state["tenant"],
            state["client_request_id"],
            state["traceparent"],
            self._context.hold_memory(state["tenant"]),
            self._dialect(),
            arrived=self._context.clock(),
            access=state["access"],
            charge=self._context.charge(state["tenant"]),
        )
        response = Response(send)
        response.headers = lambda: exchange.charge.headers(now=self._context.clock())
        REQUEST_ID.set(exchange.request_id)
        self._context.enter(needs_workers=self.needs_workers)
        try:
            exchange.charge.start(now=self._context.clock())
            await self._exchange(exchange, scope, receive, response)
            exchange.outcome = "ok"
        except ApiError as refusal:
            await self._refuse(exchange, response, exchange.dialect.renamed(refusal))
        except ClientGoneError as error:
            exchange.outcome, exchange.reason = "cancelled", str(error)
        except FullError as error:
            self._context.meters.refused(error.bound)
            answer = errors.overloaded(str(error), retry_after_seconds=error.retry_after_seconds)
            await self._refuse(exchange, response, answer)
        except RateLimitError as error:
            seconds = error.retry_after_seconds
            answer = errors.rate_limited(str(error), retry_after_seconds=seconds)
            await self._refuse(exchange, response, answer)
        except Exception as error:
            logger.exception("request failed", extra={"request_id": exchange.request_id})
            await self._refuse(exchange, response, errors.internal(exchange.request_id))
            exchange.reason = f"{type(error).__name__}: {error}"
        finally:
            exchange.held.release()
            exchange.charge.end()
            if exchange.trace is not None and exchange.trace.wake_seconds:
                self._context.meters.waited_for_wake(exchange.trace.wake_seconds)
            self._context.leave(exchange.outcome, needs_workers=self.needs_workers)
            self._log(exchange)

    async def _refuse(self, exchange: Exchange, response: Response, error: ApiError) -> None:
        exchange.outcome, exchange.reason = error.outcome, error.message
        exchange.access.code = error.code or ""
        await response.fail(error)

    async def _exchange(
        self, exchange: Exchange, scope: dict[str, Any], receive: Receive, response: Response
    ) -> None:
        context, held = self._context, exchange.held
        if context.refusing:
            raise errors.unavailable("This gateway is shutting down; another one takes requests.")
        timeout = timeout_of(scope)
        limit, turns = context.retry_policy.request_limit, context.preparer.turns
        limit.check()  # reject before the body is read
        body = [await read_body(scope, receive, held=held, turns=turns)]
        with limit.enter() as ticket:
            trace = exchange.trace = Trace(received=context.clock(), clock=context.clock)
            until = None if timeout is None else trace.received + timeout

            async def guard(work: Awaitable[T]) -> T:
                with limit.paused(ticket):
                    return await run_until_ended(work, ends=self._ends(receive, trace, until))

            # pass on the only reference, so that the body is freed once it is parsed
            requests, options = await self._prepare(body.pop(), exchange, trace, guard)
            exchange.options = options
            requests = self._charged(exchange, requests)
            prepared = requests[0]
            held.prepared(sum(one.num_bytes for one in requests) + exchange.dialect.num_bytes)
            texts: list[str] = []
            follows = prepared.next_turn is not None and options.num_choices == 1
            on_text = texts.append if follows else None
            writer = self._writer(exchange, response, options, requests, trace, on_text)
            images = prepared.images
            tiers = [image.choice.tier for image in images]
            context.meters.record_images(tiers, sum(image.num_tokens for image in images))
            with limit.enter_more(ticket, len(requests)) as tickets:
                choices = exchange.choices = Choices(
                    context,
                    requests,
                    options.num_choices,
                    writer=writer,
                    trace=trace,
                    tickets=tickets,
                )
                ends = self._ends(receive, trace, until)
                try:
                    await run_until_ended(choices.run(), ends=ends, ping=writer.ping)
                except WorkerError as error:
                    raise _answer_to(error, exchange.request_id, images) from error
            self._learn(requests, choices, trace)
            if follows:
                message = writer.message or {"role": "assistant", "content": "".join(texts)}
                self._prefetch(prepared, choices.first, message)

    def _charged(
        self, exchange: Exchange, requests: Sequence[PreparedRequest]
    ) -> tuple[PreparedRequest, ...]:
        """Take the tokens of the prompts; return the requests as their tenant's.

        Raises:
            RateLimitError: the tenant has fewer tokens left.
        """
        num_tokens = sum(one.num_prompt_tokens for one in requests)
        exchange.access.num_prompt_tokens = num_tokens
        exchange.charge.prompt(num_tokens, now=self._context.clock())
        return tuple(self._context.in_turn(one, exchange.tenant) for one in requests)

    def _learn(self, requests: Sequence[PreparedRequest], choices: Choices, trace: Trace) -> None:
        """Record the times of a request with one answer, for the estimates of others."""
        is_alone = len(requests) == choices.count == 1
        if not is_alone or requests[0].echo.no_answer or trace.first_byte is None:
            return
        stages = trace.stages()
        self._context.work.ended(
            requests[0].num_prompt_tokens,
            choices.num_output_tokens,
            prompt_seconds=stages.get("encode", 0.0) + stages.get("prefill", 0.0),
            output_seconds=self._context.clock() - trace.first_byte,
        )

    def _prefetch(
        self, prepared: PreparedRequest, answered: Generation, message: Mapping[str, Any]
    ) -> None:
        """Prefetch the next turn of a conversation whose answer has ended."""
        prefetcher = self._context.prefetcher
        answer = tuple(answered.delivered.token_ids)
        turn = EndedTurn.of(
            prepared, answered.route, answered.request, answer=answer, message=message
        )
        if prefetcher is not None and turn is not None and not self._context.draining:
            prefetcher.ended(turn)

    def _ends(
        self, receive: Receive, trace: Trace, until: float | None
    ) -> tuple[Awaitable[Exception], ...]:
        """What ends a request early; `until` is its deadline on the gateway's clock."""
        ends = until_disconnect(receive), drain_deadline(self._context)
        return ends if until is None else (*ends, deadline(trace, until))

    async def _prepare(
        self, body: BodyBytes, exchange: Exchange, trace: Trace, guard: Guard
    ) -> tuple[tuple[PreparedRequest, ...], Options]:
        context = self._context
        if delay := context.settings.delays.get("gateway"):
            await asyncio.sleep(delay)
        return await context.preparer.read(
            body,
            self._kind,
            context.config_watcher.now.config,
            held=exchange.held,
            dialect=exchange.dialect,
            request_id=exchange.request_id,
            tenant=exchange.tenant,
            trace=trace,
            guard=guard,
        )

    def _writer(
        self,
        exchange: Exchange,
        response: Response,
        options: Options,
        requests: Sequence[PreparedRequest],
        trace: Trace,
        on_text: Callable[[str], object] | None,
    ) -> ResponseWriter:
        prepared = requests[0]
        builder, form = self._context.prompt_builder, prepared.answer_form
        envelope = Envelope(
            shape=self._shape,
            request_id=prepared.request_id,
            created=int(time.time()),
            model=options.model,
            usage=options.usage,
        )
        return exchange.dialect.writer(prepared)(
            response,
            envelope,
            stream=options.stream,
            assemblers=[
                TextAssembler(
                    builder.tokenizer,
                    builder.token_texts,
                    stop=options.stop,
                    stop_token_ids=options.sampling.stop_token_ids,
                    min_tokens=prepared.sampling.min_tokens,
                    kept_ids=form.kept_ids if form else frozenset(),
                    lists_all=prepared.echo.lists_all,
                )
                for _ in range(len(requests) * options.num_choices)
            ],
            echoes=[one.echo for one in requests for _ in range(options.num_choices)],
            texts=builder.token_texts,
            readers=[
                form.reader(prepared.request_id, choice) if form else None
                for choice in range(len(requests) * options.num_choices)
            ],
            with_logprobs=options.sampling.num_logprobs is not None,
            trace=trace,
            on_token=self._meter(prepared, trace, exchange.charge),
            on_text=on_text or _ignore,
        )

    def _meter(
        self, prepared: PreparedRequest, trace: Trace, charge: RequestCharge
    ) -> Callable[[int], None]:
        """Return a callback that records each token that is sent."""
        context = self._context
        meters = context.meters
        modality = Modality.IMAGE if prepared.images else Modality.TEXT
        previous: dict[int, float] = {}
        num_tokens = 0 if prepared.echo.no_answer else 1

        def on_token(choice: int) -> None:
            now = context.clock()
            charge.output(num_tokens)
            if choice in previous:
                meters.next_token(now - previous[choice])
            elif choice > 0:
                meters.further_choice(num_tokens)
            else:
                target = context.config_watcher.now.config.slo.ttft_seconds(modality)
                stages = trace.stages()
                meters.first_token(trace.ttft, stages, modality, target, num_tokens=num_tokens)
            previous[choice] = now

        return on_token

    def _log(self, exchange: Exchange) -> None:
        trace, choices, options = exchange.trace, exchange.choices, exchange.options
        ttft = trace.ttft if trace is not None and trace.first_byte is not None else None
        access = exchange.access
        access.model = options.model if options else ""
        access.outcome, access.ttft_seconds = exchange.outcome, ttft
        if choices is not None:
            access.num_cached_tokens = choices.num_cached_tokens
            access.num_output_tokens = choices.num_output_tokens
        logger.info(
            "request",
            extra={
                "request_id": exchange.request_id,
                "client_request_id": exchange.client_request_id,
                "tenant": exchange.tenant,
                "endpoint": self._dialect.name or self._kind,
                "outcome": exchange.outcome,
                "reason": exchange.reason,
                "num_output_tokens": choices.num_output_tokens if choices else 0,
                "num_retries": choices.num_retries if choices else 0,
                "pods": choices.routes if choices else [],
                "seconds": self._context.clock() - exchange.arrived,
                "ttft_seconds": ttft,
                "wake_seconds": trace.wake_seconds if trace is not None else 0.0,
                "fetch_seconds": trace.fetch_seconds if trace is not None else 0.0,
                "labels": options.logged if options else {},
            },
        )
        if self._context.tracer is not None:
            self._context.tracer.request(exchange.request_id, self._span(exchange, ttft))

    def _span(self, exchange: Exchange, ttft: float | None) -> Span:
        """The root span of a request that ends now, with OpenTelemetry's names for its facts."""
        trace, choices, options = exchange.trace, exchange.choices, exchange.options
        operation = self._operation
        facts: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": options.model if options else None,
            "gen_ai.usage.output_tokens": choices.num_output_tokens if choices else None,
            "triptych.request_id": exchange.request_id,
            "triptych.client_request_id": exchange.client_request_id or None,
            "triptych.tenant": exchange.tenant or None,
            "triptych.outcome": exchange.outcome,
            "triptych.retries": choices.num_retries if choices else None,
            "triptych.ttft_seconds": ttft,
        }
        stages = trace.own_spans if trace is not None else ()
        return Span(
            f"{operation} {options.model}" if options else operation,
            exchange.arrived,
            self._context.clock(),
            {name: fact for name, fact in facts.items() if fact is not None},
            tuple(Span(stage.stage, stage.start, stage.end) for stage in stages),
            error=exchange.reason,
            link=exchange.traceparent,
        )


def _ignore(_: str) -> None:
    """Without a prefetch, nobody collects the text."""


def _answer_to(error: WorkerError, request_id: str, images: Sequence[RequestImage]) -> ApiError:
    """Return the client's error for the error that ended a generation."""
    if isinstance(error, NoEncoderError):
        return errors.no_encoder(held_seconds=error.held_seconds)
    if isinstance(error, NotAwakeError):
        return errors.waking(waited_seconds=error.waited_seconds)
    if isinstance(error, NoRouteError):
        what = f"{TOLD[reason]} " if (reason := str(error)) in TOLD else ""
        return errors.unavailable(f"No worker {what}is ready for the stage '{error.stage}'.")
    answer = errors.of_worker(error, request_id)
    if isinstance(error, InvalidImageError) and error.item < len(images):
        answer.param = images[error.item].path
    if answer.status >= 500:
        logger.error("request lost", extra={"request_id": request_id, "reason": str(error)})
    return answer


PING_SECONDS = 15.0


async def run_until_ended(
    work: Awaitable[T],
    *,
    ends: tuple[Awaitable[Exception], ...],
    ping: Callable[[], Awaitable[None]] | None = None,
) -> T:
    """Run `work`. If one of `ends` returns first, cancel `work` and raise the returned error."""
    task = asyncio.ensure_future(work)
    watchers = [asyncio.ensure_future(end) for end in ends]
    try:
        while True:
            done, _ = await asyncio.wait(
                (task, *watchers), timeout=PING_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if task in done:
                return await task
            for end in watchers:
                if end in done:
                    raise end.result()
            if ping is not None:
                await ping()
    finally:
        for one in (task, *watchers):
            one.cancel()
        await asyncio.gather(task, *watchers, return_exceptions=True)


async def drain_deadline(context: GatewayContext) -> Exception:
    """Wait for the end of this gateway's drain; return the error to raise."""
    await context.drain_ended.wait()
    if context.failed is not None:
        return errors.unavailable("This server has failed and ends; its log says why.")
    return errors.unavailable("This gateway is shutting down and its time to drain is over.")


async def deadline(trace: Trace, until: float) -> Exception:
    """Wait for the client's deadline, a time on the trace's clock; return the error."""
    await asyncio.sleep(until - trace.clock())
    if (waited := trace.waking_seconds) is not None:
        return errors.waking(waited_seconds=waited)
    return errors.request_deadline()
