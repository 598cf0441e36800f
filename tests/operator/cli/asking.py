"""Questions as tests of `vlm chat` ask them."""

from pathlib import Path
from typing import Any

import pytest

from vlm_cli.chat import Question, chat
from vlm_cli.output import CliError, Format
from vlm_cli.target import Options

PNG = b"\x89PNG\r\n\x1a\n" + bytes(40)


def straight(url: str | None, **changes: Any) -> Options:
    fields = {"name": None, "url": url, "namespace": None, "kubeconfig": None}
    return Options(**(fields | {"api_key": None, "model": None} | changes))


def through(kubeconfig: str, name: str = "demo", **changes: Any) -> Options:
    return straight(None, name=name, kubeconfig=kubeconfig, **changes)


def question(*images: Path, **changes: Any) -> Question:
    fields: dict[str, Any] = {"text": "What shape?", "images": images, "detail": None}
    return Question(**(fields | {"max_tokens": 16, "temperature": 0.0} | changes))


async def ask(
    options: Options, asked: Question | None = None, form: Format = Format.TABLE, **changes: Any
) -> None:
    await chat(options, asked or question(), form=form, **{"timeout": 10.0} | changes)


async def failure(options: Options, asked: Question | None = None, **changes: Any) -> CliError:
    with pytest.raises(CliError) as caught:
        await ask(options, asked, **changes)
    return caught.value
