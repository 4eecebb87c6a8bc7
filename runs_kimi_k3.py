"""What runs of hours need of the system: an end that says what is kept."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

# --- Ctrl-C and SIGTERM ----------------------------------------------------------------------------------------------


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


@contextlib.contextmanager
def keeping(said: str | Callable[[], str]) -> Iterator[None]:
    """Around work: what an interruption leaves and how to go on, unless work inside this has said it already."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if stop.args:
            raise
        raise type(stop)(said() if callable(said) else said) from stop


@contextlib.contextmanager
def postponed_stop(notice: str) -> Iterator[list[KeyboardInterrupt]]:
    """Around steps that should end whole: gives a list, in which the first Ctrl-C or SIGTERM puts its exception.

    Whoever runs the steps looks into the list behind each of them and raises what is there. The user reads `notice`
    until then; a second signal acts at once. Outside the main thread nothing changes, nor for signals that are ignored.
    """
    stops: list[KeyboardInterrupt] = []

    def note(number: int, frame: object) -> None:
        stop = Terminated() if number == signal.SIGTERM else KeyboardInterrupt()
        if stops:
            raise stop
        stops.append(stop)
        # past the buffers of Python, in the middle of which a signal may come
        os.write(2, f"\n{notice}\n".encode())

    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.getsignal(number) for number in numbers}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, note)
    try:
        yield stops
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
