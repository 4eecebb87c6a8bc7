"""Texts and messages of requests become token ids: the bytes are limited before, one text at a time, within a deadline.

A tokenizer needs some fifty bytes of memory for a byte of text and cannot be interrupted, so no client may have several
large texts read at once. Short ones have a thread of their own, and never wait behind large ones.
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

SHORT = 64 << 10  # bytes of a text that is read in a fraction of a second


class PromptError(ValueError):
    """A prompt that cannot be read; the text is the sentence for whoever sent it."""


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
        self.tokenizer, self.prompt_tokens = tokenizer, prompt_tokens
        self.most_bytes = prompt_tokens * max(len(token.encode()) for token in tokenizer.get_vocab())
        self._lanes = [_Lane(waiting, name) for name in ("short prompts", "large prompts")]

    @property
    def waiting(self) -> int:
        """Texts that wait until others are read."""
        return sum(lane.waiting for lane in self._lanes)

    async def ids(self, text: str, deadline: float) -> list[int]:
        """The token ids of a text.

        Args:
            deadline: `time.monotonic()` after which nobody waits for them any more.

        Raises:
            PromptError: a text with more than `most_bytes`, before it is read, or one that is no Unicode.
            TooMany: at once.
            TimeoutError: at the deadline. A text that is being read by then is read to its end, and only then the next.
        """
        return await self._read(self._size(text), lambda: self.tokenizer(text, verbose=False).input_ids, deadline)

    async def chat_ids(self, messages: list[dict[str, str]], deadline: float) -> list[int]:
        """The token ids of messages, up to where the assistant's next one begins, by the tokenizer's template.

        Raises:
            PromptError: also where there is no template, or it takes no such messages.
        """
        if self.tokenizer.chat_template is None:
            raise PromptError("the tokenizer of this model has no chat template: ask /v1/completions instead")
        size = self._size("".join(message["content"] for message in messages))
        return await self._read(size, lambda: self._rendered(messages), deadline)

    async def _read(self, size: int, read, deadline: float) -> list[int]:
        async with asyncio.timeout(deadline - time.monotonic()):
            return await self._lanes[size > SHORT].run(read)

    def _size(self, text: str) -> int:
        """Bytes of a text that may be read."""
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise PromptError("prompt: the text has half of a surrogate pair") from None
        if size > self.most_bytes:
            counted = f"the prompt has {size:,} bytes, more than {self.prompt_tokens:,} tokens can have"
            raise PromptError(f"{counted}, and no more tokens are allowed")
        return size

    def _rendered(self, messages: list[dict[str, str]]) -> list[int]:
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program, which the messages may lead anywhere
            raise PromptError(f"messages: the chat template cannot take these: {error}") from error
        self._size(text)
        return self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids


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
