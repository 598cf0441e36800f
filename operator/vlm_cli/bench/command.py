"""The command `vlm bench`: target, images, load, report."""

from __future__ import annotations

import dataclasses
import re
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import aiohttp
import typer

from vlm_cli import flags
from vlm_cli.bench.load import Arrival, Result, make_image, poisson, run_load
from vlm_cli.bench.report import print_report, summarise
from vlm_cli.client import Answer, chat_body, read_image, stream_chat
from vlm_cli.output import CliError, Format, console, emit, notes
from vlm_cli.target import Options, Target, open_target

IMAGE_QUESTION = "What color is the shape?"
TEXT_QUESTION = "What is 2 + 3?"

NUM_SEEDS = 1 << 24  # small, so that a seed is easy to type


@dataclasses.dataclass(frozen=True)
class Load:
    """The load of one run.

    Attributes:
        rate: mean requests per second.
        duration: seconds of load.
        image_share: share of requests with an image, 0 to 1.
        images: image files; if empty, images of `width` by `height` pixels are generated.
        distinct: number of different generated images; 0 means one per request.
        question: text of every request; None means a default.
        seed: seed of arrivals and images.
        timeout: seconds for one answer.
        drain: seconds to wait for answers after the last request.
    """

    rate: float
    duration: float
    image_share: float
    images: Sequence[Path]
    distinct: int
    width: int
    height: int
    question: str | None
    max_tokens: int
    seed: int
    timeout: float
    drain: float


def new_seed() -> int:
    """Return a random seed, so that images of an earlier run are not in caches."""
    return secrets.randbelow(NUM_SEEDS)


async def bench(
    name: Annotated[
        str | None, flags.service_argument("A VLMService; left out with --url.")
    ] = None,
    rate: Annotated[float, typer.Option(min=0.001, help="Requests a second, on average.")] = 2.0,
    duration: Annotated[float, typer.Option(min=0.1, help="Seconds of load.")] = 30.0,
    image_share: Annotated[float, typer.Option(min=0, max=1, help="With an image.")] = 0.5,
    image: flags.Images = None,
    distinct: Annotated[
        int, typer.Option(min=0, help="Different images to make; 0: one a request.")
    ] = 0,
    image_size: Annotated[str, typer.Option(metavar="WxH", help="Of made images.")] = "224x224",
    question: Annotated[str | None, typer.Option(help="Asked every time.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 16,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Same seed, same load.  [default: a new one, printed]")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one answer.")] = 60.0,
    drain: Annotated[float, typer.Option(min=0, help="Seconds to wait at the end.")] = 60.0,
    namespace: flags.Namespace = None,
    url: flags.Url = None,
    model: flags.Model = None,
    api_key: flags.ApiKey = None,
    output: flags.Output = Format.TABLE,
    kubeconfig: flags.Kubeconfig = None,
    context: flags.Context = None,
) -> None:
    """Send open-loop load (Poisson) and report percentiles, stages and errors.

    Raises:
        CliError: see `run`.
    """
    width, height = _size(image_size)
    load = Load(
        rate=rate,
        duration=duration,
        image_share=image_share,
        images=image or [],
        distinct=distinct,
        width=width,
        height=height,
        question=question,
        max_tokens=max_tokens,
        seed=new_seed() if seed is None else seed,
        timeout=timeout,
        drain=drain,
    )
    options = Options(name, url, namespace, kubeconfig, api_key, model, context)
    await run(options, load, output=output)


def _size(text: str) -> tuple[int, int]:
    size = re.fullmatch(r"([0-9]+)x([0-9]+)", text)
    if size is None or not all(8 <= int(side) <= 4096 for side in size.groups()):
        raise typer.BadParameter("write WIDTHxHEIGHT, each 8 to 4096", param_hint="--image-size")
    return int(size[1]), int(size[2])


async def run(options: Options, load: Load, *, output: Format) -> None:
    """Run the load and print its report.

    Raises:
        CliError: there is nothing to send, the target is unusable, or no request was answered.
    """
    files = [read_image(path) for path in load.images]
    arrivals = poisson(load.rate, load.duration, load.image_share, load.seed)
    if not arrivals:
        raise CliError(
            f"no request falls into {load.duration:g} s at {load.rate:g} a second",
            "raise --rate or --duration, or take another --seed",
        )
    async with open_target(options) as target:
        sent = f"{len(arrivals)} requests in {load.duration:g} s to {target.url}"
        notes().print(f"{sent}; --seed={load.seed} repeats them", style="dim")
        start = time.perf_counter()
        results = await _run(target, load, arrivals, files)
        elapsed = time.perf_counter() - start
    report = {"load": _described(load, target)} | summarise(results, elapsed=elapsed)
    if output is Format.TABLE:
        print_report(report, console())
    else:
        emit(report, output)
    if results and all(result.answer is None for result in results):
        raise CliError(f"none of {len(results)} requests was answered", "see the errors above")


async def _run(
    target: Target, load: Load, arrivals: Sequence[Arrival], files: Sequence[bytes]
) -> list[Result]:
    limits = aiohttp.ClientTimeout(total=load.timeout, sock_connect=10)
    # no limit: requests that wait here for a connection would not count as the server's delay
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=limits, connector=connector) as session:

        async def ask(arrival: Arrival) -> Answer:
            return await stream_chat(session, target, _body(target, load, arrival, files))

        return await run_load(arrivals, ask, drain_seconds=load.drain)


def _body(
    target: Target, load: Load, arrival: Arrival, files: Sequence[bytes]
) -> dict[str, object]:
    images = []
    if arrival.image:
        if files:
            images = [files[arrival.number % len(files)]]
        else:
            number = arrival.number % load.distinct if load.distinct else arrival.number
            seed = load.seed * 1_000_003 + number
            images = [make_image(seed, width=load.width, height=load.height)]
    question = load.question or (IMAGE_QUESTION if arrival.image else TEXT_QUESTION)
    return chat_body(target.model, question, images, max_tokens=load.max_tokens)


def _described(load: Load, target: Target) -> dict[str, object]:
    return {
        "model": target.model,
        "ratePerSecond": load.rate,
        "durationSeconds": load.duration,
        "imageShare": load.image_share,
        "images": [str(path) for path in load.images]
        or f"{load.distinct or 'all'} distinct, {load.width}x{load.height}",
        "maxTokens": load.max_tokens,
        "seed": load.seed,
    }
