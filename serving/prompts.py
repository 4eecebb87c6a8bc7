"""Texts of requests become token ids: the bytes are limited before, one text at a time, within a deadline.

A tokenizer needs some fifty bytes of memory for a byte of text and cannot be interrupted, so no client may have several
large texts read at once. Short ones have a thread of their own, and never wait behind large ones.
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

SHORT = 64 << 10  # bytes of a text that is read in a fraction of a second


class TooMany(Exception):
    """As many texts wait as may wait."""


class PromptReader:
    """Token ids of texts.

    Args:
        tokenizer: of transformers.
        prompt_tokens: of the longest prompt that is allowed.
        waiting: texts that may wait, short and large ones each.

    Attributes:
        most_bytes: of UTF-8. A text with more has more than `prompt_tokens` tokens, whatever they are.
    """

    def __init__(self, tokenizer, prompt_tokens: int, waiting: int):
        self.tokenizer = tokenizer
        self.most_bytes = prompt_tokens * max(len(token.encode()) for token in tokenizer.get_vocab())
        self._lanes = [_Lane(waiting, name) for name in ("short prompts", "large prompts")]

    @property
    def waiting(self) -> int:
        """Texts that wait until others are read."""
        return sum(lane.waiting for lane in self._lanes)

    async def ids(self, text: str, deadline: float) -> list[int]:
        """The token ids of a text with at most `most_bytes`.

        Args:
            deadline: `time.monotonic()` after which nobody waits for them any more.

        Raises:
            TooMany: at once.
            TimeoutError: at the deadline. A text that is being read by then is read to its end, and only then the next.
        """
        lane = self._lanes[len(text.encode()) > SHORT]
        async with asyncio.timeout(deadline - time.monotonic()):
            return await lane.run(lambda: self.tokenizer(text, verbose=False).input_ids)


class _Lane:
    """One thread, and those who wait for it."""

    def __init__(self, waiting: int, name: str):
        self.waiting, self._most_waiting, self._free = 0, waiting, asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, work):
        if self.waiting >= self._most_waiting:
            raise TooMany
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        done = asyncio.get_running_loop().run_in_executor(self._thread, work)
        done.add_done_callback(self._next)
        return await asyncio.shield(done)

    def _next(self, done: asyncio.Future) -> None:
        """Only now is the thread free: whoever waited for `done` may have gone."""
        self._free.release()
        if not done.cancelled():
            done.exception()  # nobody may be left who asks for it
