"""Prefill and decoding apart: one process reads prompts, another continues them from states and latents it receives.

    Prefiller   a prompt, all but its last token, in chunks; in the last one every layer's state or latents leave as
                soon as the layer has them, while the next ones compute
    Receiver    puts a prompt's layers together, `length` tokens of it, as a `Saved`: what a request that gave way has
                too, so that a `BatchEngine` goes on from it (`Request.saved`)

They speak over any stream socket, in messages of a length and a safetensors file, without pickles. Whoever connects is
trusted to send the states of this model; that it *is* this model both sides check first.
"""

import functools
import json
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import torch as safetensors

from ..fingerprint_kimi_k3 import model_fingerprint
from .batch import PrefillBatch, attend_parts, parts_of, prefill_logits
from .pool import Saved, Sequence, StatePool
from .sent import sent

_SIZES = struct.Struct("<IQ")  # of a message: bytes of its JSON head and of its tensors
_MOST_HEAD, _MOST_TENSORS = 64 << 20, 64 << 30


def _send(link: socket.socket, head: dict[str, Any], tensors: dict[str, torch.Tensor]) -> int:
    data, body = json.dumps(head).encode(), safetensors.save(tensors) if tensors else b""
    link.sendall(_SIZES.pack(len(data), len(body)) + data)
    link.sendall(body)
    return _SIZES.size + len(data) + len(body)


def _receive(link: socket.socket) -> tuple[dict[str, Any], dict[str, torch.Tensor], float]:
    """Head and tensors of the next message, and the seconds from its first bytes to its last.

    Raises:
        EOFError: the other side has gone.
        ValueError: for what is no message.
    """
    head_size, size = _SIZES.unpack(_exactly(link, _SIZES.size))
    begin = time.monotonic()
    if head_size > _MOST_HEAD or size > _MOST_TENSORS:
        raise ValueError("the other side sends something else than states of prompts")
    head = json.loads(_exactly(link, head_size))
    body = bytes(_exactly(link, size))
    seconds = time.monotonic() - begin
    return head, safetensors.load(body) if size else {}, seconds


def _exactly(link: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = link.recv_into(view)
        if not count:
            raise EOFError("the other side has closed the connection")
        view = view[count:]
    return data


def _greet(link: socket.socket, model: Any) -> None:
    own = model_fingerprint(model)
    _send(link, {"model": own}, {})
    if _receive(link)[0].get("model") != own:
        raise ValueError("the other side has another model: states of one mean nothing to the other")


def _nothing(layer: int) -> None:
    pass


class Prefiller:
    """Reads prompts and sends what a decoding process needs of them.

    Args:
        model: as a `BatchEngine` takes it.
        link: a connected stream socket, with a `Receiver` at its other end.
        tokens: of the longest prompt.
        chunk: tokens of a forward.

    Raises:
        ValueError: if the other side has another model.
    """

    def __init__(self, model: Any, link: socket.socket, tokens: int, chunk: int = 2048):
        _greet(link, model)
        self.model, self.link, self.chunk = model, link, chunk
        self.pool = StatePool(model, 1, tokens=tokens)
        self.sent_bytes = 0
        self._messages: queue.SimpleQueue = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._send_all, name="prefiller", daemon=True)
        self._thread.start()

    def prefill(self, name: str, prompt: list[int]) -> None:
        """
        Raises:
            ValueError: for a prompt that is too long, or has no token before its last.
            OSError: if the other side has gone.
        """
        length = len(prompt) - 1
        if length < 1 or self.pool.pages_of(length) > self.pool.pages:
            room = self.pool.pages * self.pool.page + 1
            raise ValueError(f"a prompt has 2 to {room:,} tokens here, and this one {len(prompt):,}")
        sequence = self.pool.open()
        assert sequence is not None  # the only one
        try:
            self.pool.grow(sequence, length)
            self._messages.put(({"name": name, "prompt": prompt, "layers": len(self.model.base_model.layers)}, {}))

            def stored(layer: int) -> None:
                self._messages.put(({"name": name, "layer": layer}, self.pool.layer(sequence, layer, length)))

            while sequence.length < length:
                tokens = prompt[sequence.length : length][: self.chunk]
                is_last = sequence.length + len(tokens) == length
                self._feed(sequence, tokens, stored if is_last else _nothing)
        finally:
            self.pool.close(sequence)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Send what is left, and say that nothing follows."""
        self._messages.put(None)
        self._thread.join()
        self.link.close()
        if self._error is not None:
            raise self._error

    def _feed(self, sequence: Sequence, tokens: list[int], stored: Callable[[int], None]) -> None:
        pool = self.pool
        parts, rows = parts_of(pool, [sequence], [len(tokens)])
        attend, places = functools.partial(attend_parts, pool, parts), sent(rows, pool.device)
        slot, ids = (torch.tensor(numbers, device=pool.device) for numbers in ([sequence.slot], tokens))
        batch = PrefillBatch(pool, slot, places, None, attend, stored)
        prefill_logits(self.model, ids, ids.new_tensor([len(tokens) - 1]), batch)
        sequence.length += len(tokens)

    def _send_all(self) -> None:
        try:
            while (message := self._messages.get()) is not None:
                self.sent_bytes += _send(self.link, *message)
            self.link.shutdown(socket.SHUT_WR)
        except Exception as error:  # which `prefill` and `close` raise
            self._error = error


@dataclass
class Arrived:
    """A prompt whose states have come: `saved` holds all but its last token."""

    name: str
    prompt: list[int]
    saved: Saved


class Receiver:
    """Iterates over the prompts that a `Prefiller` has read, in the order in which they are whole.

    Args:
        model: the one that will continue them.
        link: a connected stream socket.

    Attributes:
        received_bytes, seconds: of tensors, and spent on receiving them.

    Raises:
        ValueError: if the other side has another model, or sends what is not whole.
    """

    def __init__(self, model: Any, link: socket.socket):
        _greet(link, model)
        self.link, self.received_bytes, self.seconds = link, 0, 0.0

    def __iter__(self) -> Iterator[Arrived]:
        open_: dict[str, tuple[Arrived, int]] = {}
        while True:
            try:
                head, tensors, seconds = _receive(self.link)
            except EOFError:
                if open_:
                    raise ValueError(f"the other side has gone in the middle of {', '.join(open_)}") from None
                return
            name = head["name"]
            if "prompt" in head:
                saved = Saved(len(head["prompt"]) - 1, {}, {})
                open_[name] = Arrived(name, head["prompt"], saved), head["layers"]
                continue
            if name not in open_:
                raise ValueError(f"the other side sends a layer of {name!r}, a prompt that it has not announced")
            arrived, layers = open_[name]
            arrived.saved.put(head["layer"], tensors)
            self.received_bytes += sum(tensor.nbytes for tensor in tensors.values())
            self.seconds += seconds
            if arrived.saved.layers == layers:
                del open_[name]
                yield arrived
