"""An S3 server on loopback with one model: list, conditional ranges, and faults that a test sets.

As the real one, it refuses requests whose signature is not of its keys, and parts of an object that
has another ETag.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
import re
from xml.sax.saxutils import escape

from aiohttp import web
from worker.serve.hub import LARGE, MODEL

KEY, SECRET = "AKIATEST", "secret/of+the+test"
BUCKET, PREFIX = "models", "team/shapes"
PAGE = 3  # keys of one answer: a list has several


@dataclasses.dataclass
class Bucket:
    """One bucket. The test writes the faults.

    Attributes:
        objects: content by key.
        num_cuts: answers with the large file that end halfway.
        changes: the large file gets another ETag after the list.
        changes_last: `config.json` gets other content once the large file is sent.
        etags: whether the list has ETags.
        down: every call is answered with 503.
        stalls: an answer with the large file stops halfway until `resume` is set; `stalled` is set
            at that moment.
        lists: number of lists.
        sent: key and first byte of each object that was asked for, in order.
    """

    objects: dict[str, bytes] = dataclasses.field(
        default_factory=lambda: {
            f"{PREFIX}/{path.name}": path.read_bytes() for path in sorted(MODEL.iterdir())
        }
    )
    num_cuts: int = 0
    changes: bool = False
    changes_last: bool = False
    etags: bool = True
    down: bool = False
    stalls: bool = False
    stalled: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    resume: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    lists: int = 0
    sent: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    url: str = ""

    @property
    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/{bucket}", self._list)
        app.router.add_get("/{bucket}/{key:.+}", self._object)
        return app

    def etag(self, key: str) -> str:
        return f'"{hashlib.md5(self.objects[key], usedforsecurity=False).hexdigest()}"'

    def _refusal(self, request: web.Request) -> web.Response | None:
        if self.down:
            return _error(503, "ServiceUnavailable")
        if not _is_signed(request):
            return _error(403, "SignatureDoesNotMatch")
        if request.match_info["bucket"] != BUCKET:
            return _error(404, "NoSuchBucket")
        return None

    async def _list(self, request: web.Request) -> web.Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        assert request.query["list-type"] == "2"
        self.lists += 1
        after = request.query.get("continuation-token", "")
        prefix = request.query.get("prefix", "")
        keys = sorted(key for key in self.objects if key.startswith(prefix) and key > after)
        page, more = keys[:PAGE], len(keys) > PAGE
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z"
            f"</LastModified>{f'<ETag>{escape(self.etag(key))}</ETag>' if self.etags else ''}"
            f"<Size>{len(self.objects[key])}</Size></Contents>"
            for key in page
        )
        token = f"<NextContinuationToken>{page[-1]}</NextContinuationToken>" if more else ""
        text = (
            f"<ListBucketResult><Name>{BUCKET}</Name><KeyCount>{len(page)}</KeyCount>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{contents}</ListBucketResult>"
        )
        return web.Response(text=text, content_type="application/xml")

    async def _object(self, request: web.Request) -> web.StreamResponse:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        key = request.match_info["key"]
        if key not in self.objects:
            return _error(404, "NoSuchKey")
        if self.changes and key.endswith(LARGE):
            self.changes = False
            self.objects[key] = bytes(len(self.objects[key]))
        if request.headers.get("If-Match") != self.etag(key):
            return _error(412, "PreconditionFailed")
        data = self.objects[key]
        first, last = map(int, re.findall(r"\d+", request.headers["Range"]))
        part = data[first : last + 1]
        self.sent.append((key.removeprefix(f"{PREFIX}/"), first))
        response = web.StreamResponse(
            status=206,
            headers={
                "ETag": self.etag(key),
                "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
                "Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(data)}",
                "Content-Length": str(len(part)),
            },
        )
        await response.prepare(request)
        half = len(part) // 2
        await response.write(part[:half])
        if key.endswith(LARGE) and self.num_cuts:
            self.num_cuts -= 1
            assert request.transport is not None
            request.transport.abort()
            return response
        if key.endswith(LARGE) and self.stalls:
            self.stalled.set()
            await self.resume.wait()
        await response.write(part[half:])
        if key.endswith(LARGE) and self.changes_last:
            self.changes_last = False
            self.objects[f"{PREFIX}/config.json"] += b" "
        return response


def _error(status: int, code: str) -> web.Response:
    text = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
    return web.Response(status=status, text=text, content_type="application/xml")


def _is_signed(request: web.Request) -> bool:
    """Whether the request has the signature of KEY and SECRET.

    https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
    """
    found = re.fullmatch(
        r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d+)/([^/]+)/s3/aws4_request, "
        r"SignedHeaders=([^,]+), Signature=(\w+)",
        request.headers.get("Authorization", ""),
    )
    if found is None or found[1] != KEY:
        return False
    _, day, region, names, signature = found.groups()
    path, _, query = request.raw_path.partition("?")
    headers = "".join(f"{name}:{request.headers[name].strip()}\n" for name in names.split(";"))
    query = "&".join(sorted(query.split("&"))) if query else ""
    body = request.headers["x-amz-content-sha256"]
    canonical = "\n".join(("GET", path, query, headers, names, body))
    scope = f"{day}/{region}/s3/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = f"AWS4-HMAC-SHA256\n{request.headers['x-amz-date']}\n{scope}\n{digest}"
    key = f"AWS4{SECRET}".encode()
    for part in (day, region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.compare_digest(hmac.digest(key, text.encode(), "sha256").hex(), signature)
