"""What stands before the application: who may enter, the names of requests, and the size and time of their bodies."""

import asyncio
import hmac
import re
import time
import uuid

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

OPEN = ("/health", "/ready")  # addresses that need no key
REQUEST_ID = re.compile(rb"[\w.:+/=@-]{1,128}", re.ASCII)


def error_body(status: int, message: str) -> dict:
    kind = "invalid_request_error" if status < 500 else "server_error"
    message = message.encode("utf-8", "replace").decode("utf-8")  # half a character of the request is no JSON
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def refusal(status: int, message: str, headers: dict | None = None) -> JSONResponse:
    return JSONResponse(error_body(status, message), status, headers)


class Door:
    """Gives every request a name, the client's `x-request-id` where it is one, and asks for the key.

    Args:
        api_key: which requests must have as `Authorization: Bearer KEY`; None lets all in.
    """

    def __init__(self, app, api_key: str | None):
        self.app = app
        self.wanted = None if api_key is None else b"Bearer " + api_key.encode()

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        name = headers.get(b"x-request-id", b"")
        if not REQUEST_ID.fullmatch(name):
            name = uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = name.decode()

        async def named(message):
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-request-id", name)]}
            await send(message)

        app = self.app
        if self.wanted is not None and scope["path"] not in OPEN:
            if not hmac.compare_digest(headers.get(b"authorization", b""), self.wanted):
                app = refusal(401, "the API key is missing or wrong", {"www-authenticate": "Bearer"})
        await app(scope, receive, named)


class WholeBody:
    """Refuses a body that has more bytes than its limit, takes longer than its time, or is one too many to be kept.

    Args:
        most: bytes of a body.
        most_kept: bytes of the bodies of all requests that are not answered yet.
        always: bytes of a body that is never one too many, however much others sent.
        seconds: from a request's headers to the end of its body.
    """

    def __init__(self, app, most: int, most_kept: int, always: int, seconds: float):
        self.app, self.most, self.most_kept, self.always, self.seconds = app, most, most_kept, always, seconds
        self.kept = 0

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        size, whole, end = 0, False, time.monotonic() + self.seconds
        declared = dict(scope["headers"]).get(b"content-length", b"")

        async def limited():
            nonlocal size, whole
            if whole:  # what comes now is the departure of the client
                return await receive()
            # the rest of a body that is too large is read and forgotten, or the client would never see the answer
            if declared.isdigit() and int(declared) > self.most:
                raise self._too_large()
            try:
                async with asyncio.timeout(end - time.monotonic()):
                    message = await receive()
            except TimeoutError:
                sentence = f"the request was not whole after {self.seconds:g} seconds"
                raise HTTPException(408, sentence, {"connection": "close"}) from None
            size += (more := len(message.get("body", b"")))
            self.kept += more
            if size > self.most:
                raise self._too_large()
            if self.kept > self.most_kept and size > self.always:
                raise HTTPException(503, "the server is reading as much as it can keep: try again later")
            whole = not message.get("more_body", False)
            return message

        def forget():
            nonlocal size
            self.kept -= size
            size = 0

        async def forgetting(message):
            # before the client has the last byte: its next body may be here before the application has returned
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                forget()
            await send(message)

        try:
            await self.app(scope, limited, forgetting)
        finally:
            forget()

    def _too_large(self):
        return HTTPException(413, f"the request has more than {self.most:,} bytes")
