"""A hub on loopback with one model: the calls of a download, and faults that a test sets.

As the real one, it names small files by their Git blob id and large ones (LFS) by SHA-256, and
answers ranges.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from aiohttp import web

MODEL = Path(__file__).parents[3] / "examples/shapes/model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = "model.safetensors"


@dataclasses.dataclass
class Hub:
    """One repository, org/shapes, at one commit. The test writes the faults.

    Attributes:
        token: what a client must present; None for a public model.
        gated: the token's account has not accepted the licence.
        num_cuts: transfers of the large file that end halfway.
        damaged: the large file arrives with other content of the same size.
        down: every call is answered with 503.
        stalls: the large file arrives after `resume` is set; `stalled` is set once it is asked for.
        commits: the revisions that exist, all with the same files.
        sent: names of the files that were asked for, in order.
    """

    token: str | None = None
    gated: bool = False
    num_cuts: int = 0
    damaged: bool = False
    down: bool = False
    stalls: bool = False
    stalled: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    resume: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    commits: set[str] = dataclasses.field(default_factory=lambda: {COMMIT})
    num_requests: int = 0
    sent: list[str] = dataclasses.field(default_factory=list)
    url: str = ""

    @property
    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/api/models/org/shapes/revision/{revision}", self._info)
        app.router.add_get("/api/models/org/shapes/tree/{revision}", self._tree)
        app.router.add_get("/org/shapes/resolve/{revision}/{name}", self._file)
        return app

    async def _info(self, request: web.Request) -> web.Response:
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        files = [{"rfilename": path.name} for path in sorted(MODEL.iterdir())]
        files.append({"rfilename": "training.bin"})
        return web.json_response({"id": "org/shapes", "sha": COMMIT, "siblings": files})

    async def _tree(self, request: web.Request) -> web.Response:
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        return web.json_response([_entry(path) for path in sorted(MODEL.iterdir())])

    async def _file(self, request: web.Request) -> web.StreamResponse:
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        path = MODEL / request.match_info["name"]
        data, start, headers = path.read_bytes(), 0, _headers(path)
        headers["X-Repo-Commit"] = request.match_info["revision"]
        large = path.name == LARGE and request.method == "GET"
        if large and self.damaged:
            data = bytes(len(data))
        given = request.headers.get("Range", "")
        if given.startswith("bytes="):
            start = int(given.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if large and self.stalls:
            self.stalled.set()
            await self.resume.wait()
        if request.method == "GET":
            self.sent.append(path.name)
        if large and self.num_cuts:
            self.num_cuts -= 1
            headers["Content-Length"] = str(len(data) - start)
            response = web.StreamResponse(status=206 if start else 200, headers=headers)
            await response.prepare(request)
            await response.write(data[start : start + (len(data) - start) // 2])
            assert request.transport is not None
            request.transport.close()
            return response
        return web.Response(body=data[start:], status=206 if given else 200, headers=headers)

    def _refusal(self, request: web.Request) -> web.Response | None:
        self.num_requests += 1
        if self.down:
            return _refuse(503, "Unavailable")
        if self.token is not None and request.headers.get("Authorization") != (
            f"Bearer {self.token}"
        ):
            return _refuse(401, "RepoNotFound")
        if self.gated:
            return _refuse(403, "GatedRepo")
        if request.match_info["revision"] not in self.commits:
            return _refuse(404, "RevisionNotFound")
        return None


def _refuse(status: int, code: str) -> web.Response:
    headers = {"X-Error-Code": code, "X-Error-Message": code}
    return web.json_response({"error": code}, status=status, headers=headers)


def _entry(path: Path) -> dict[str, Any]:
    entry = {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": _blob_id(path)}
    if path.name == LARGE:
        entry["lfs"] = {"oid": _sha256(path), "size": path.stat().st_size, "pointerSize": 134}
    return entry


def _headers(path: Path) -> dict[str, str]:
    etag = _sha256(path) if path.name == LARGE else _blob_id(path)
    return {
        "ETag": f'"{etag}"',
        "X-Linked-Size": str(path.stat().st_size),
        "Accept-Ranges": "bytes",
    }


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _blob_id(path: Path) -> str:
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
