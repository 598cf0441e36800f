"""The clients that nobody here wrote: their pinned packages, and the script that uses each.

Their environments lie under `~/.cache/triptych/clients`, made once per set of pins.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import shutil
import sys
from pathlib import Path

from pinned import UnavailableError, digest, environment, run

SCRIPTS = Path(__file__).parent / "scripts"
FOLDER = Path.home() / ".cache" / "triptych" / "clients"


@dataclasses.dataclass(frozen=True, slots=True)
class OpenAIClient:
    """One client.

    Attributes:
        script: in `SCRIPTS`; `.py` runs in a virtual environment, `.mjs` in Node.
        pins: packages with versions; none: the script runs in the project's own environment.
        lent: packages that the script imports from the project's environment. PyPI's torch with
            CUDA has 5 GB.
    """

    script: str
    pins: tuple[str, ...] = ()
    lent: tuple[str, ...] = ()


CLIENTS = {
    "openai (Python)": OpenAIClient("by_openai.py"),
    "openai (Node)": OpenAIClient("by_openai.mjs", ("openai@7.59.0", "zod@4.6.7")),
    "AI SDK": OpenAIClient(
        "by_ai_sdk.mjs",
        ("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "@ai-sdk/openai@4.0.118", "zod@4.6.7"),
    ),
    "LangChain": OpenAIClient("by_langchain.py", ("langchain-openai==1.7.4",)),
    "LiteLLM": OpenAIClient("by_litellm.py", ("litellm==1.110.2",)),
    "instructor": OpenAIClient("by_instructor.py", ("instructor==1.17.0", "pillow==13.0.0")),
    "OpenAI Agents SDK": OpenAIClient("by_agents.py", ("openai-agents==0.24.0",)),
    "lm-evaluation-harness": OpenAIClient(
        "by_lm_eval.py", ("lm-eval[api]==0.4.13", "transformers==5.23.0", "pillow==13.0.0")
    ),
    "GuideLLM": OpenAIClient("by_guidellm.py", ("guidellm[vision]==0.8.1",), ("torch",)),
    "Open WebUI": OpenAIClient("by_open_webui.py", ("open-webui==0.12.4",), ("torch",)),
}


def command_of(client: OpenAIClient, work: Path) -> list[str]:
    """The command that runs its script. Installs the client unless it is there.

    Args:
        client: one of `CLIENTS`.
        work: an empty folder for this run.

    Raises:
        UnavailableError: Node, npm or the packages are missing.
    """
    scripts = work / "scripts"
    shutil.copytree(SCRIPTS, scripts)
    if client.script.endswith(".py"):
        python = (
            environment(FOLDER, client.pins, lent=client.lent)
            if client.pins
            else Path(sys.executable)
        )
        return [str(python), str(scripts / client.script)]
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            raise UnavailableError(f"{tool} is not installed")
    (work / "node_modules").symlink_to(_node_modules(client.pins))
    return ["node", str(scripts / client.script)]


def version_of(client: OpenAIClient) -> str:
    """The version of its first package."""
    if not client.pins:
        return importlib.metadata.version("openai")
    return client.pins[0].rpartition("@" if client.script.endswith(".mjs") else "=")[2]


def _node_modules(pins: tuple[str, ...]) -> Path:
    folder = FOLDER / digest(*pins)
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "package.json").write_text('{"private": true}')
        run("npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", *pins)
        (folder / "ready").touch()
    return folder / "node_modules"
