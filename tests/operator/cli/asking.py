"""Questions as tests of `vlm chat` ask them."""

from pathlib import Path
from typing import Any

import pytest

from vlm_cli.chat import chat
from vlm_cli.output import CliError

PNG = b"\x89PNG\r\n\x1a\n" + bytes(40)
QUESTION = "What shape?"


def straight(url: str, **flags: Any) -> dict[str, Any]:
    """The arguments that ask an address."""
    return {"name": QUESTION, "url": url, **flags}


def through(kubeconfig: str, name: str = "demo", **flags: Any) -> dict[str, Any]:
    """The arguments that ask a service of a cluster."""
    return {"name": name, "question": QUESTION, "kubeconfig": kubeconfig, **flags}


async def ask(target: dict[str, Any], *images: Path, **flags: Any) -> None:
    await chat(**{"image": list(images), "max_tokens": 16, "timeout": 10.0} | target | flags)


async def failure(target: dict[str, Any], *images: Path, **flags: Any) -> CliError:
    with pytest.raises(CliError) as caught:
        await ask(target, *images, **flags)
    return caught.value
