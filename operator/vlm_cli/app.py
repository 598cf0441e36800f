"""Defines the commands and their flags; each command calls a module that does its work."""

from __future__ import annotations

import datetime
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from vlm_cli.output import (
    AllNamespaces,
    ApiKey,
    Context,
    Format,
    Images,
    Kubeconfig,
    Model,
    Namespace,
    Output,
    ServiceName,
    Url,
)
from vlm_cli.output import run as run_command
from vlm_cli.target import Options

WorkerImage = Annotated[
    str | None,
    typer.Option(metavar="IMAGE", help="The operator's default image; default: its own default."),
]

app = typer.Typer(
    name="vlm",
    help="Vision-language models on Kubernetes: look at services, ask them, load them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command()
def status(
    name: ServiceName = None,
    namespace: Namespace = None,
    everywhere: AllNamespaces = False,
    output: Output = Format.TABLE,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Show what runs, what blocks and where the time goes."""
    from vlm_cli.status import show_status

    run_command(
        show_status(
            name,
            namespace=namespace,
            everywhere=everywhere,
            kubeconfig=kubeconfig,
            context=context,
            form=output,
            now=datetime.datetime.now(datetime.UTC),
        )
    )


@app.command()
def chat(
    name: Annotated[str, typer.Argument(help="A VLMService; left out with --url.")],
    question: Annotated[str | None, typer.Argument(help="What to ask.")] = None,
    image: Images = None,
    detail: Annotated[str | None, typer.Option(help="auto, low, high or original.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of the answer.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for the answer.")] = 120.0,
    namespace: Namespace = None,
    url: Url = None,
    model: Model = None,
    api_key: ApiKey = None,
    output: Output = Format.TABLE,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Ask one question, about images or not, and see where the time went."""
    from vlm_cli.chat import Question, chat

    service: str | None = name
    if question is None:
        if url is None:
            raise typer.BadParameter('write: vlm chat NAME "question"', param_hint="QUESTION")
        service, question = None, name
    options = Options(service, url, namespace, kubeconfig, api_key, model, context)
    asked = Question(question, image or [], detail, max_tokens, temperature)
    run_command(chat(options, asked, form=output, timeout=timeout))


@app.command()
def bench(
    name: Annotated[str | None, typer.Argument(help="A VLMService; left out with --url.")] = None,
    rate: Annotated[float, typer.Option(min=0.001, help="Requests a second, on average.")] = 2.0,
    duration: Annotated[float, typer.Option(min=0.1, help="Seconds of load.")] = 30.0,
    image_share: Annotated[float, typer.Option(min=0, max=1, help="With an image.")] = 0.5,
    image: Images = None,
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
    namespace: Namespace = None,
    url: Url = None,
    model: Model = None,
    api_key: ApiKey = None,
    output: Output = Format.TABLE,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Send open-loop load (Poisson) and report percentiles, stages and errors."""
    from vlm_cli.bench.command import Load, bench, new_seed

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
    run_command(
        bench(Options(name, url, namespace, kubeconfig, api_key, model, context), load, form=output)
    )


@app.command()
def simulate(
    trace: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|FILE", help="Generated, or JSON lines; repeatable."),
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A VLMService with its VLMNodeClasses."),
    ] = None,
    hardware: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What the hardware can do, as YAML.")
    ] = None,
    against: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A baseline, or all; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same run.")] = 1,
    seconds: Annotated[float, typer.Option(min=60, help="Of generated traces.")] = 3600.0,
    scale: Annotated[float, typer.Option(min=0.01, help="Multiplies their rate.")] = 1.0,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Missed minutes by device-hours.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Decisions, for `vlm why --record`."),
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Try a policy on traffic, in simulated time, beside what other autoscalers do."""
    from vlm_cli.simulate import SimulateOptions, run_simulation
    from vlm_cli.simulator.baselines import BASELINES

    async def work() -> None:
        run_simulation(
            SimulateOptions(
                traces=tuple(trace or ["bursty-images"]),
                policy=policy,
                hardware=hardware,
                against=tuple(BASELINES) if against == ["all"] else tuple(against or ()),
                seed=seed,
                seconds=seconds,
                scale=scale,
                plot=plot,
                record=record,
            ),
            form=output,
        )

    run_command(work())


@app.command()
def why(
    name: ServiceName = None,
    record: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Decide again what the operator logged, and say why."),
    ] = None,
    last: Annotated[bool, typer.Option("--last", help="Only the last record of FILE.")] = False,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Say why each pool has its size, and what would change it."""
    from vlm_cli.why import explain_records, explain_services

    if record is not None:
        run_command(explain_records(record, last=last))
        return
    run_command(explain_services(name, namespace=namespace, kubeconfig=kubeconfig, context=context))


@app.command("rollout-plan")
def rollout(
    name: Annotated[str | None, typer.Argument(help="A VLMService; left out with --from.")] = None,
    old: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="The manifest that runs.")
    ] = None,
    new: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="The manifest to apply.")
    ] = None,
    worker_image: WorkerImage = None,
    namespace: Namespace = None,
    output: Output = Format.TABLE,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Print the steps from one manifest to another, offline; or where a service's rollout is."""
    if (old is None) != (new is None) or (old is None) == (name is None):
        raise typer.BadParameter("give the NAME of a service, or both --from and --to")
    if old is not None and new is not None:
        from vlm_cli.offline import show_rehearsal

        run_command(show_rehearsal(old, new, worker_image=worker_image, form=output))
        return
    from vlm_cli.revisions import show_rollout

    assert name is not None
    run_command(
        show_rollout(name, namespace=namespace, kubeconfig=kubeconfig, context=context, form=output)
    )


@app.command()
def render(
    manifest: Annotated[
        Path,
        typer.Option("-f", "--filename", metavar="PATH", help="A file or folder; - reads stdin."),
    ],
    worker_image: WorkerImage = None,
    namespace: Namespace = None,
) -> None:
    """Print the objects that the operator makes of a manifest, as YAML, without a cluster."""
    from vlm_cli.offline import show_children

    run_command(show_children(manifest, worker_image=worker_image, namespace=namespace))


@app.command()
def doctor(
    namespace: Annotated[
        str | None,
        typer.Option("-n", "--namespace", metavar="NS", help="Services of one; default: all."),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Also fetch the metrics of one gateway.")
    ] = False,
    output: Output = Format.TABLE,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Say what is missing in this cluster, and what to do; status 1 where something fails."""
    from vlm_cli.doctor.command import examine_cluster

    run_command(
        examine_cluster(
            namespace=namespace,
            kubeconfig=kubeconfig,
            context=context,
            form=output,
            now=datetime.datetime.now(datetime.UTC).timestamp(),
            probe=probe,
        )
    )


@app.command()
def release_finalizers(
    name: ServiceName = None,
    namespace: Namespace = None,
    everywhere: AllNamespaces = False,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Remove the finalizers of deleted services if the operator is gone: nothing else does."""
    from vlm_cli.release import release

    run_command(
        release(
            name,
            namespace=namespace,
            everywhere=everywhere,
            kubeconfig=kubeconfig,
            context=context,
        )
    )


def run() -> None:
    """Run the command line of this process, with the commands that other packages register."""
    for command in entry_points(group="vlm.commands"):
        app.command(command.name)(command.load())
    app()


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (
        width.isdecimal()
        and height.isdecimal()
        and 8 <= int(width) <= 4096
        and 8 <= int(height) <= 4096
    ):
        raise typer.BadParameter("write WIDTHxHEIGHT, each 8 to 4096", param_hint="--image-size")
    return int(width), int(height)
