"""How the server ends: Ctrl-C and SIGTERM let requests under way end, for a while, and say in one line how it went.

first signal        new requests are answered 503; who waits or is answered has `seconds`
`seconds` later     the engine breaks off what runs: its clients are told so
`ANSWERS` later     connections that are still there are closed
`LAST_STEP` later   the process ends, whatever the engine still computes
second signal       the process ends at once
"""

import asyncio
import os
import signal
import time
from typing import NoReturn

import uvicorn

from ..runs_kimi_k3 import Terminated
from .engine import Engine

ANSWERS = 2  # seconds in which clients take the last of their answers


class CompletionServer(uvicorn.Server):
    """uvicorn's server, which ends as the other commands do.

    uvicorn itself closes its door at the first signal, cancels requests that take long, whose tracebacks it then logs,
    and leaves the engine's thread to whatever ends the process.

    Args:
        seconds: that a stop leaves to requests under way.
    """

    def __init__(self, config: uvicorn.Config, engine: Engine, seconds: float):
        super().__init__(config)
        self.engine, self.seconds, self.broken_off = engine, seconds, 0
        self._stop: KeyboardInterrupt | None = None
        self._end = 0.0

    def handle_exit(self, sig, frame):
        if self._stop is not None:
            _end(sig, "requests under way were not answered")
        self._stop = Terminated() if sig == signal.SIGTERM else KeyboardInterrupt()
        self._end = time.monotonic() + self.seconds
        self.engine.is_stopping = True
        if self.server_state.tasks:
            waiting = f"requests under way have {self.seconds:g} seconds; a second Ctrl-C ends the server at once"
            os.write(2, f"\nkimi-k3 serve: {waiting}\n".encode())

    async def on_tick(self, counter: int) -> bool:
        if self._stop is not None and not self.should_exit:
            if not self.server_state.tasks:
                self.should_exit = True
            elif time.monotonic() > self._end:
                self.broken_off = len(self.server_state.tasks)
                self.engine.abort()
                self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets=None):
        asyncio.get_running_loop().call_later(ANSWERS, self._close_connections)
        await super().shutdown(sockets)

    def _close_connections(self):
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def run_until_stopped(self) -> None:
        """Serve until a signal.

        Raises:
            KeyboardInterrupt: of the signal, with a sentence about the requests under way.
        """
        self.run()
        if self._stop is not None:
            late = f"requests that were not answered within {self.seconds:g} seconds, and broken off: {self.broken_off}"
            said = late if self.broken_off else "every request was answered"
            if self.engine.alive:
                _end(signal.SIGTERM if isinstance(self._stop, Terminated) else signal.SIGINT, said)
            raise type(self._stop)(said)


def _end(number: int, said: str) -> NoReturn:
    """End the process although threads compute, for which Python would wait or under which it would abort."""
    os.write(2, f"\nkimi-k3 serve: interrupted; {said}\n".encode())
    os._exit(128 + number)
