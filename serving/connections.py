"""Connections of the server, limited in number and in time: a slow or silent client gives its place back.

uvicorn limits neither the time of a request's headers and body nor that of a reader that takes no answer, and a
connection that waits for these is there for good. This protocol ends it:

    connection opened    the headers of a request are whole within `header_seconds`
    headers read         its body is whole within `body_seconds` (`server.WholeBody` answers 408 by then)
    answer written       the client takes what is written within `stalled_seconds`

Idle connections between two requests end after uvicorn's `timeout_keep_alive`. Where as many are open as may be, a new
one takes the place of the one that has waited longest for its client: who holds many and asks for nothing keeps out
nobody. Only while all of them have a whole request under way it is refused.
"""

import asyncio
from dataclasses import dataclass

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"
    b'{"error": {"message": "too many connections are open: try again later", "type": "server_error", "param": null, '
    b'"code": null}}'
)


@dataclass(frozen=True)
class ConnectionLimits:
    """Connections at once, bytes of a request's headers, and the seconds of the table above."""

    connections: int = 512
    header_bytes: int = 16 << 10
    header_seconds: float = 10
    body_seconds: float = 60
    stalled_seconds: float = 60


class LimitedConnection(H11Protocol):
    """One connection; subclasses have the `limits` (see `uvicorn_options`)."""

    limits: ConnectionLimits

    def connection_made(self, transport):
        super().connection_made(transport)
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._waits_since = self.loop.time()
        if not self._has_place():
            transport.write(_FULL)
            self._close_soon()
            return
        self._headers_only = True
        self._reading = self.loop.call_later(self.limits.header_seconds, transport.abort)

    def _has_place(self) -> bool:
        """Whether this new connection may be open, perhaps in the place of another."""
        others = [each for each in self.connections if each is not self and not each.transport.is_closing()]
        if len(others) < self.limits.connections:
            return True
        waiting = [each for each in others if each.conn.their_state in (h11.IDLE, h11.SEND_BODY)]
        if waiting:
            min(waiting, key=lambda each: each._waits_since).transport.abort()
        return bool(waiting)

    def data_received(self, data):
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:  # of the next request, whose first bytes these may be
            headers_only, seconds = True, self.limits.header_seconds
        elif self.conn.their_state is h11.SEND_BODY:
            # the application answers 408 first, so that a client which still reads learns why
            headers_only, seconds = False, self.limits.body_seconds + 5
        else:
            self._reading = _stopped(self._reading)
            return
        if self._reading is None or headers_only != self._headers_only:
            _stopped(self._reading)
            self._headers_only, self._reading = headers_only, self.loop.call_later(seconds, self.transport.abort)

    def pause_writing(self):
        super().pause_writing()
        self._writing = self._writing or self.loop.call_later(self.limits.stalled_seconds, self.transport.abort)

    def resume_writing(self):
        super().resume_writing()
        self._writing = _stopped(self._writing)

    def on_response_complete(self):
        super().on_response_complete()
        self._waits_since = self.loop.time()
        if self.transport.is_closing():
            self._close_soon()

    def timeout_keep_alive_handler(self):
        super().timeout_keep_alive_handler()
        self._close_soon()

    def connection_lost(self, exc):
        super().connection_lost(exc)
        _stopped(self._reading)
        _stopped(self._writing)

    def _close_soon(self):
        """Close; what the client does not take of the last answer by then is lost."""
        self.transport.close()
        self._writing = self._writing or self.loop.call_later(self.limits.stalled_seconds, self.transport.abort)


def _stopped(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def uvicorn_options(limits: ConnectionLimits) -> dict:
    """Keyword arguments of `uvicorn.Config`."""
    return {
        "http": type("Connection", (LimitedConnection,), {"limits": limits}),
        "ws": "none",  # an upgrade would leave the protocol, and with it the limits
        "h11_max_incomplete_event_size": limits.header_bytes,
        "log_level": "warning",
    }
