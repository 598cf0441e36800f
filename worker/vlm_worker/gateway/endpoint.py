"""One request of `/v1/chat/completions` or `/v1/completions`, from its body to its last word."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from vlm_worker.errors import InvalidImageError, WorkerError
from vlm_worker.gateway.answering import ClientGoneError, Response, Send, Writer
from vlm_worker.gateway.api import errors
from vlm_worker.gateway.api.answers import ChatShape, CompletionShape, Envelope
from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.api.requests import Options
from vlm_worker.gateway.body import Receive, read_body, timeout_of, until_disconnect
from vlm_worker.gateway.choices import Choices
from vlm_worker.gateway.memory import FullError, Held
from vlm_worker.gateway.orchestrate.generation import Generation
from vlm_worker.gateway.orchestrate.job import Emit, Job
from vlm_worker.gateway.orchestrate.recovery import Place
from vlm_worker.gateway.orchestrate.routing import NoEncoderError, NoRouteError
from vlm_worker.gateway.orchestrate.trace import Trace
from vlm_worker.gateway.pictures import Picture
from vlm_worker.gateway.piecing import Piecing
from vlm_worker.gateway.service import Service
from vlm_worker.gateway.watching import cut, too_late, watched
from vlm_worker.types import Modality

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _Exchange:
    """What the log says of a request in the end. Its endpoint call is its only writer."""

    request_id: str
    tenant: str
    client_request_id: str
    held: Held
    arrived: float
    outcome: str = "error"
    options: Options | None = None
    trace: Trace | None = None
    choices: Choices | None = None
    reason: str = ""


class Endpoint:
    """An ASGI application for one path."""

    def __init__(self, service: Service, kind: Literal["chat", "completion"]) -> None:
        self._service = service
        self._kind = kind
        self._shape = ChatShape() if kind == "chat" else CompletionShape()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Serve one request; whatever happens, it gets its last word, here and in the log."""
        state = scope["state"]
        exchange = _Exchange(
            state["request_id"],
            state["tenant"],
            state["client_request_id"],
            self._service.hold_memory(state["tenant"]),
            arrived=self._service.clock(),
        )
        response = Response(send)
        self._service.enter()
        try:
            await self._exchange(exchange, scope, receive, response)
            exchange.outcome = "ok"
        except ApiError as error:
            exchange.outcome, exchange.reason = error.outcome, error.message
            await _last_word(response, error)
        except ClientGoneError as error:
            exchange.outcome, exchange.reason = "cancelled", str(error)
        except Exception as error:
            exchange.reason = f"{type(error).__name__}: {error}"
            logger.exception("request failed", extra={"request_id": exchange.request_id})
            await _last_word(response, errors.internal(exchange.request_id))
        finally:
            exchange.held.release()
            self._service.leave(exchange.outcome)
            self._log(exchange)

    async def _exchange(
        self, exchange: _Exchange, scope: dict[str, Any], receive: Receive, response: Response
    ) -> None:
        service, held = self._service, exchange.held
        if service.refusing:
            raise errors.unavailable("This gateway is shutting down; another one takes requests.")
        timeout = timeout_of(scope)
        room, turns = service.recovery.room, service.preparer.turns
        try:
            room.check()  # before anything is spent on it
            body = [await read_body(scope, receive, held=held, turns=turns)]
            place = room.enter()
        except FullError as error:
            service.meters.refused(error.bound)
            raise errors.full(error) from error
        with place:
            trace = exchange.trace = Trace(received=service.clock(), clock=service.clock)
            # the only reference to the body goes where it is read
            job, options = await self._prepare(body.pop(), exchange)
            exchange.options = options
            held.prepared(job.num_bytes)
            writer = self._writer(response, options, job, trace)
            choices = exchange.choices = self._choices(job, options, writer, trace, place)
            ends = (until_disconnect(receive), cut(service), too_late(trace, timeout))
            try:
                await watched(choices.run(), ends=ends, ping=writer.ping)
            except WorkerError as error:
                raise _answer_to(error, exchange.request_id, job.pictures) from error

    async def _prepare(self, body: bytearray, exchange: _Exchange) -> tuple[Job, Options]:
        service = self._service
        if delay := service.settings.delays.get("gateway"):
            await asyncio.sleep(delay)
        return await service.preparer.read(
            body,
            self._kind,
            service.live.now.config,
            request_id=exchange.request_id,
            tenant=exchange.tenant,
        )

    def _writer(self, response: Response, options: Options, job: Job, trace: Trace) -> Writer:
        language = self._service.language
        envelope = Envelope(
            shape=self._shape,
            request_id=job.request_id,
            created=int(time.time()),
            model=options.model,
            include_usage=options.include_usage,
        )
        return Writer(
            response,
            envelope,
            stream=options.stream,
            pieces=[
                Piecing(language.tokenizer, language.token_texts, stop=options.stop)
                for _ in range(options.num_choices)
            ],
            with_logprobs=options.sampling.num_logprobs is not None,
            trace=trace,
            on_token=self._meter(job, trace),
        )

    def _meter(self, job: Job, trace: Trace) -> Callable[[int], None]:
        """Counts the tokens of each choice as they leave."""
        service = self._service
        meters = service.meters
        modality = Modality.IMAGE if job.pictures else Modality.TEXT
        previous: dict[int, float] = {}

        def on_token(choice: int) -> None:
            now = service.clock()
            if choice in previous:
                meters.next_token(now - previous[choice])
            elif choice > 0:
                meters.further_choice()
            else:
                target = service.live.now.config.slo.ttft_seconds(modality)
                meters.first_token(trace.ttft, trace.stages(), modality, target)
            previous[choice] = now

        return on_token

    def _choices(
        self, job: Job, options: Options, writer: Writer, trace: Trace, place: Place
    ) -> Choices:
        service = self._service
        service.meters.pictures(len(job.pictures), sum(p.num_tokens for p in job.pictures))

        def generate(job: Job, emit: Emit, index: int) -> Generation:
            return Generation(
                job,
                emit,
                # the time to the first token is that of the choice that goes ahead
                trace=trace if index == 0 else Trace(received=trace.received, clock=trace.clock),
                registry=service.registry,
                background=service.background,
                recovery=service.recovery,
                place=place,
                heartbeat=writer.heartbeat,
            )

        return Choices(job, options.num_choices, writer=writer, generate=generate)

    def _log(self, exchange: _Exchange) -> None:
        trace, choices, options = exchange.trace, exchange.choices, exchange.options
        ttft = trace.ttft if trace is not None and trace.first_byte is not None else None
        logger.info(
            "request",
            extra={
                "request_id": exchange.request_id,
                "client_request_id": exchange.client_request_id,
                "tenant": exchange.tenant,
                "endpoint": self._kind,
                "outcome": exchange.outcome,
                "reason": exchange.reason,
                "num_output_tokens": choices.num_output_tokens if choices else 0,
                "num_retries": choices.num_retries if choices else 0,
                "seconds": self._service.clock() - exchange.arrived,
                "ttft_seconds": ttft,
                "labels": options.logged if options else {},
            },
        )


async def _last_word(response: Response, error: ApiError) -> None:
    try:
        await response.fail(error)
    except ClientGoneError:
        logger.debug("nobody is there to hear of an error")


def _answer_to(error: WorkerError, request_id: str, pictures: Sequence[Picture] = ()) -> ApiError:
    """What the client is told of a worker's last word."""
    if isinstance(error, NoEncoderError):
        return errors.no_encoder(held_seconds=error.held_seconds)
    if isinstance(error, NoRouteError):
        return errors.unavailable(f"No worker is ready for the stage '{error.stage}'.")
    answer = errors.of_worker(error, request_id)
    if isinstance(error, InvalidImageError) and error.item < len(pictures):
        answer.param = pictures[error.item].path
    if answer.status >= 500:
        logger.error("request lost", extra={"request_id": request_id, "reason": str(error)})
    return answer
