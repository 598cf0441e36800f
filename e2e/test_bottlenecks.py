"""Every pool of mode Auto grows for the load that is its own, and no other grows with it.

images ─▶ encoder +      long answers ─▶ decode +      long prompts ─▶ prefill +
text alone ─▶ encoder 0 ─▶ an image is encoded inline ─▶ images ─▶ encoder +

Pods are held back by their CPU limits. A fixed number of clients, each of which asks again as soon
as it has its answer, keeps a pool busy however fast the machine is, and no queue grows beyond them.
"""

import asyncio
import base64
import contextlib
import io
import itertools
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image
from served import ANSWER, START_SECONDS, Served, example, is_ready

from vlm_local.client import Object
from vlm_local.controlplane import ControlPlane
from vlm_local.waiting import until
from vlm_operator.names import POOL_ROLES, Role

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
NAME = "shapes"
NAMESPACE = "bottlenecks"
GROWS_SECONDS = 120.0  # of load until a pool grows
SLEEPS_SECONDS = 120.0  # without an image until the encoder is gone
CPU = {Role.ENCODER: "100m", Role.PREFILL: "400m", Role.DECODE: "1"}
WORDS = 450  # of a long prompt
TOKENS = 1000  # of a long answer
Ask = Callable[[openai.AsyncOpenAI, random.Random], Awaitable[Any]]


def _manifest(*, encoder_sleeps: bool = False) -> Object:
    manifest = example("quickstart")
    spec = manifest["spec"]
    spec["model"]["maxModelLen"] = 2048
    spec["slo"] = {"ttftP95Milliseconds": 2000, "windowSeconds": 10}
    spec["slo"]["overrides"] = [{"modality": "Image", "ttftP95Milliseconds": 4000}]
    spec["autoscaling"] = {"intervalSeconds": 1}
    for role, pool in spec["pools"].items():
        for amounts in pool["variants"][0]["resources"].values():
            amounts["cpu"] = CPU[role]
        behavior = {
            "scaleUp": {
                "stabilizationWindowSeconds": 4,
                "maxPodsPerMinute": 1,
            },
            "scaleDown": {"stabilizationWindowSeconds": 600, "maxPodsPerMinute": 10},
        }
        scaling = {"mode": "Auto", "minReplicas": 1, "maxReplicas": 3, "behavior": behavior}
        pool["scaling"] = scaling
    spec["pools"]["prefill"]["encodeInline"] = True
    spec["pools"]["decode"]["kv"] = {"memory": "32Mi"}
    if encoder_sleeps:
        scaling = spec["pools"]["encoder"]["scaling"]
        scaling |= {"minReplicas": 0, "scaleToZero": {"idleSeconds": 5}}
        scaling["behavior"]["scaleDown"]["stabilizationWindowSeconds"] = 5
    return manifest


@pytest.fixture(scope="module", autouse=True)
def limited(operator: ControlPlane) -> None:
    if "limits are not enforced" in (operator.folder / "agent.log").read_text():
        pytest.skip("CPU limits cannot be set here: test_recorded.py replays a run that had them")


@pytest.fixture
async def served(endless_cluster: ControlPlane) -> AsyncIterator[Served]:
    """The quickstart with pools that the autoscaler sizes, in a hurry, Ready."""
    async with endless_cluster.client() as api:
        one = Served(endless_cluster, api, NAMESPACE, NAME)
        await one.apply(_manifest())
        await one.ready()
        yield one


async def test_each_pool_grows_for_its_own_load_and_no_other(served: Served):
    await _grows(served, Role.ENCODER, _image, clients=6, says="encoder_queue")
    await _grows(served, Role.DECODE, _long_answer, clients=10, says="kvTokens")
    await _grows(served, Role.PREFILL, _long_prompt, clients=5, says="prefill_queue")


async def test_the_encoder_sleeps_through_text_and_wakes_for_images(served: Served):
    await served.apply(_manifest(encoder_sleeps=True))

    async def size(zero: bool) -> bool:
        return ((await _sizes(served))[Role.ENCODER] == 0) is zero

    async with _asking(served, _short_text, 1):
        await until(lambda: size(True), seconds=SLEEPS_SECONDS, awaited="the encoder to sleep")

    async def gone() -> bool:
        return not await served.pods(Role.ENCODER, leaving=True)

    await until(gone, seconds=GROWS_SECONDS, awaited="the encoders to be gone", every=0.2)
    told = await _explained(served)
    print(told)
    assert "Idle" in _about(told, Role.ENCODER)
    assert (await served.ask(max_tokens=16)).startswith(ANSWER), "encoded inline"
    async with _asking(served, _image, 6):
        await until(lambda: size(False), seconds=GROWS_SECONDS, awaited="the encoder to wake")
        told = await _explained(served)
        print(told)
        assert "Wake" in _about(told, Role.ENCODER)

        async def awake() -> bool:
            return any(map(is_ready, await served.pods(Role.ENCODER)))

        await until(awake, seconds=START_SECONDS, awaited="an encoder to be ready", every=0.2)
    assert (await served.ask(max_tokens=16)).startswith(ANSWER)


async def _grows(served: Served, role: Role, ask: Ask, *, clients: int, says: str) -> None:
    """Under this load one pool grows, alone, and `vlm why` names what it lacked."""
    before = await _sizes(served)
    async with _asking(served, ask, clients) as answered:

        async def grown() -> bool:
            return await _sizes(served) != before

        try:
            await until(grown, seconds=GROWS_SECONDS, awaited=f"{role} to grow", every=0.2)
        except TimeoutError as error:
            told = f"{len(answered)} answers\n{await _explained(served)}"
            raise AssertionError(f"{error}\n{told}") from error
    told = await _explained(served)
    print(f"{before} before, {len(answered)} answers\n{told}")
    after = await _sizes(served)
    assert {one for one in POOL_ROLES if after[one] > before[one]} == {role}, told
    about = _about(told, role)
    assert says in about, told
    assert "ScaleUp" in about, told
    await served.num_ready(role, after[role])
    await served.ready()


@contextlib.asynccontextmanager
async def _asking(served: Served, ask: Ask, clients: int) -> AsyncIterator[list[Any]]:
    """So many clients, one request each at a time; leaving waits for the last answers."""
    answered: list[Any] = []
    enough = asyncio.Event()

    async def one(seed: int) -> None:
        chance = random.Random(seed)
        async with served.client() as client:
            while not enough.is_set():
                answered.append(await ask(client, chance))

    tasks = [asyncio.create_task(one(next(_SEEDS))) for _ in range(clients)]
    try:
        yield answered
        enough.set()
        await asyncio.gather(*tasks)  # raises what a client was told instead of an answer
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_SEEDS = itertools.count()  # nobody asks twice, so that no cache answers


async def _image(client: openai.AsyncOpenAI, chance: random.Random) -> Any:
    """An image that nobody has seen, and a word about it."""
    noise = Image.frombytes("RGB", (56, 56), chance.randbytes(3 * 56 * 56)).resize((448, 448))
    with io.BytesIO() as file:
        noise.save(file, "JPEG")
        url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is to the right of the circle?"},
    ]
    return await _ask(client, content, max_tokens=1)


async def _long_answer(client: openai.AsyncOpenAI, chance: random.Random) -> Any:
    return await _ask(client, _words(chance, 4), max_tokens=TOKENS)


async def _long_prompt(client: openai.AsyncOpenAI, chance: random.Random) -> Any:
    return await _ask(client, _words(chance, WORDS), max_tokens=1)


async def _short_text(client: openai.AsyncOpenAI, chance: random.Random) -> Any:
    return await _ask(client, _words(chance, 4), max_tokens=16)


def _words(chance: random.Random, number: int) -> str:
    vocabulary = ("circle", "square", "triangle", "red", "green", "blue", "left", "right", "of")
    return " ".join(chance.choice(vocabulary) for _ in range(number))


async def _ask(client: openai.AsyncOpenAI, content: Any, *, max_tokens: int) -> Any:
    answer = await client.chat.completions.create(
        model=NAME, max_tokens=max_tokens, messages=[{"role": "user", "content": content}]
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == max_tokens
    return answer.usage


async def _sizes(served: Served) -> dict[Role, int]:
    """Replicas that each pool should have."""
    pools = (await served.service())["status"]["pools"]
    return {role: pools[role]["desiredReplicas"] for role in POOL_ROLES}


async def _explained(served: Served) -> str:
    """What `vlm why` prints."""
    command = (Path(sys.executable).parent / "vlm", "why", served.name)
    where = ("--namespace", served.namespace, "--kubeconfig", served.cluster.kubeconfig)
    process = await asyncio.create_subprocess_exec(
        *command, *where, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


def _about(told: str, role: Role) -> str:
    """The lines about one pool."""
    [found] = [part for part in told.split("\n\n") if part.startswith(f"{role}:")]
    return found
