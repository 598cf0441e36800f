"""Open WebUI, a chat front end: its server runs here, and gets what its page would send."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import socketio
from calls import ANSWER, IMAGE, MODEL, QUESTION, URL, call

START_SECONDS, ANSWER_SECONDS = 180, 60
ADMIN = {"name": "Admin", "email": "admin@example.org", "password": "A-password-1"}


@contextlib.contextmanager
def _started() -> Iterator[str]:
    """The URL of an Open WebUI with an empty database, whose only provider is Triptych."""
    with socket.socket() as free:  # its log does not name a port that the system chose
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tempfile.mkdtemp(dir=Path.cwd())
    environment = {
        **os.environ,
        "OPENAI_API_BASE_URL": URL, "OPENAI_API_KEY": "none", "ENABLE_OLLAMA_API": "false",
        "DATA_DIR": folder, "WEBUI_SECRET_KEY": "secret", "OFFLINE_MODE": "true",
        "RAG_EMBEDDING_ENGINE": "openai", "ANONYMIZED_TELEMETRY": "false",
    }  # fmt: skip
    program = str(Path(sys.executable).with_name("open-webui"))
    with subprocess.Popen(
        [program, "serve", "--host=127.0.0.1", f"--port={port}"],
        env=environment, cwd=folder, stdout=sys.stderr, preexec_fn=_end_with_parent,  # noqa: PLW1509  it has no threads
    ) as server:  # fmt: skip
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(server, url)
            yield url
        finally:
            server.kill()


def _end_with_parent() -> None:
    """Linux kills this process if the script ends, for example because it took too long."""
    set_death_signal = 1
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def _wait(server: subprocess.Popen[bytes], url: str) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and server.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").is_success:
                return
        time.sleep(0.5)
    raise RuntimeError("Open WebUI did not start")


def _uploaded(api: httpx.Client) -> str:
    """The id of the image, which Open WebUI stores."""
    given = {"file": (IMAGE.name, IMAGE.read_bytes(), "image/png")}
    answer = api.post("/api/v1/files/", params={"process": "false"}, files=given)
    file_id: str = answer.raise_for_status().json()["id"]
    return file_id


def _body(file_id: str) -> dict[str, Any]:
    """A request of the page. Tools of its own would not fit into the context of the model."""
    image = {"type": "image_url", "image_url": {"url": file_id}}
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION}, image]}],
        "params": {"temperature": 0, "function_calling": "legacy"},
        "stream": True,
    }


def _main() -> None:
    with _started() as url, httpx.Client(base_url=url, timeout=ANSWER_SECONDS) as api:
        signed = api.post("/api/v1/auths/signup", json=ADMIN).raise_for_status().json()
        api.headers["Authorization"] = f"Bearer {signed['token']}"

        @call("the list of models")
        def _models() -> None:
            found = api.get("/api/models").raise_for_status().json()["data"]
            assert MODEL in [each["id"] for each in found], found

        @call("/api/chat/completions, an uploaded image, a stream")
        def _stream() -> None:
            body = _body(_uploaded(api))
            with api.stream("POST", "/api/chat/completions", json=body) as answer:
                lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
            assert answer.headers["content-type"].startswith("text/event-stream"), lines
            assert lines[-1] == "[DONE]", lines
            texts = [
                choice["delta"].get("content") or ""
                for line in lines[:-1]
                for choice in json.loads(line).get("choices", [])
            ]
            assert ANSWER in "".join(texts), texts

        @call("a chat of its page, an uploaded image, events of the websocket")
        def _chat() -> None:
            asyncio.run(asyncio.wait_for(_page(url, signed["token"], api), ANSWER_SECONDS))


async def _page(url: str, token: str, api: httpx.Client) -> None:
    """A new chat: its answer arrives in events, and is saved."""
    user_id, answer_id = str(uuid.uuid4()), str(uuid.uuid4())
    async with socketio.AsyncSimpleClient() as client:
        await client.connect(
            url, socketio_path="/ws/socket.io", auth={"token": token}, transports=["websocket"]
        )
        await client.emit("user-join", {"auth": {"token": token}})
        file_id = await asyncio.to_thread(_uploaded, api)
        body = _body(file_id) | {
            "session_id": client.sid,
            "id": answer_id,
            "parent_id": None,
            "user_message": {
                "id": user_id, "parentId": None, "role": "user", "content": QUESTION,
                "childrenIds": [], "models": [MODEL],
                "files": [{"type": "image", "url": file_id, "content_type": "image/png"}],
            },
        }  # fmt: skip
        started = await asyncio.to_thread(api.post, "/api/chat/completions", json=body)
        chat_id = started.raise_for_status().json()["chat_id"]
        found: dict[str, Any] = {}
        while found.get("chat:active", {}).get("active") is not False:
            _, event = await client.receive()
            found[event["data"]["type"]] = event["data"].get("data")
    assert "chat:message:error" not in found, found
    assert {"chat:completion", "response:completion"} & set(found), found
    saved = await asyncio.to_thread(api.get, f"/api/v1/chats/{chat_id}")
    messages = saved.raise_for_status().json()["chat"]["history"]["messages"]
    assert ANSWER in messages[answer_id]["content"], messages


_main()
