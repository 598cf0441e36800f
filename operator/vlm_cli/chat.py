"""`vlm chat`: sends one question, streams the answer, and prints TTFT by stage."""

from __future__ import annotations

from typing import Annotated, Any

import aiohttp
import typer
from rich.console import Console

from vlm_cli import flags
from vlm_cli.client import Answer, ApiError, chat_body, read_image, stream_chat
from vlm_cli.output import CliError, Format, console, emit, ordered, ttft_breakdown
from vlm_cli.target import Options, open_target


async def chat(
    name: Annotated[str, flags.service_argument("A VLMService; left out with --url.")],
    question: Annotated[str | None, typer.Argument(help="What to ask.")] = None,
    image: flags.Images = None,
    detail: Annotated[str | None, typer.Option(help="auto, low, high or original.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of the answer.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for the answer.")] = 120.0,
    namespace: flags.Namespace = None,
    url: flags.Url = None,
    model: flags.Model = None,
    api_key: flags.ApiKey = None,
    output: flags.Output = Format.TABLE,
    kubeconfig: flags.Kubeconfig = None,
    context: flags.Context = None,
) -> None:
    """Ask one question, about images or not, and see where the time went.

    Raises:
        CliError: an image cannot be read, or the gateway refuses or does not answer in time.
    """
    service: str | None = name
    if question is None:
        if url is None:
            raise typer.BadParameter('write: vlm chat NAME "question"', param_hint="QUESTION")
        service, question = None, name
    options = Options(service, url, namespace, kubeconfig, api_key, model, context)
    images = [read_image(path) for path in image or []]
    out = console()
    quiet = output is not Format.TABLE
    async with open_target(options) as target:
        body = chat_body(
            target.model,
            question,
            images,
            max_tokens=max_tokens,
            temperature=temperature,
            detail=detail,
        )
        limits = aiohttp.ClientTimeout(total=timeout, sock_connect=10)
        try:
            async with aiohttp.ClientSession(timeout=limits) as session:
                answer = await stream_chat(
                    session, target, body, on_text=None if quiet else _printer(out)
                )
        except ApiError as error:
            raise CliError(f"the gateway answered {error.kind}: {error}") from error
        except TimeoutError as error:
            raise CliError(
                f"no answer within {timeout:g} s", "give it more with --timeout"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise CliError(f"the connection to {target.url} failed: {error}") from error
    if quiet:
        emit(answer_view(answer), output)
    else:
        out.print()
        print_times(answer, out)


def answer_view(answer: Answer) -> dict[str, Any]:
    """Return the output of `-o json`: the answer, both TTFTs in milliseconds, stages, usage."""
    return {
        "answer": answer.text,
        "finishReason": answer.finish_reason,
        "ttftMilliseconds": _round(answer.ttft_ms),
        "clientTtftMilliseconds": _milliseconds(answer.first_token),
        "totalMilliseconds": _milliseconds(answer.total),
        "stagesMilliseconds": {s: _round(answer.stages[s]) for s in ordered(answer.stages)},
        "usage": answer.usage,
    }


def print_times(answer: Answer, out: Console) -> None:
    """Print the TTFT breakdown, the client's times, and the usage."""
    out.print()
    if answer.stages:
        out.print(ttft_breakdown(answer.stages))
    else:
        out.print("The server reports no stage times.")
    first = f"first token after {(answer.first_token or answer.total) * 1e3:.0f} ms here"
    out.print(f"{first}, all of it after {answer.total * 1e3:.0f} ms", style="dim")
    if usage := answer.usage:
        details = usage.get("prompt_tokens_details") or {}
        parts = ", ".join(
            f"{details[f'{kind}_tokens']} {kind}"
            for kind in ("image", "text", "cached")
            if details.get(f"{kind}_tokens") is not None
        )
        prompt = f"{usage.get('prompt_tokens')} prompt tokens" + (f" ({parts})" if parts else "")
        out.print(f"{prompt}, {usage.get('completion_tokens')} answer tokens", style="dim")
    if answer.finish_reason == "length":
        out.print("The answer was cut at --max-tokens.", style="yellow")


def _printer(out: Console) -> Any:
    def piece(text: str) -> None:
        out.file.write(text)
        out.file.flush()

    return piece


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else _round(seconds * 1e3)


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
