"""What client and keeper say to each other: length-prefixed batches of msgpack messages.

A frame is a little-endian uint32, the length of the body, then the body: a msgpack array of
messages, each an array that starts with its name. No pickle: both sides read plain data only.

To the keeper:

- ``open, config, epoch, clear, first_retire_id, log_level``
- ``move, *Move.pack()``; ``agree, retire_id``; ``appraised, question_id, bytes``; ``rotate, epoch``
- ``ping, number``; ``close, deadline_s``

From the keeper:

- ``hello`` (its loop runs); ``error, class name, line`` (open failed; it ends)
- ``event, pack_event(...)``; the first is the `Recovered` of its open
- ``pong, number``; ``stats, {...}``; ``log, logger, level, text``; ``closed, clean``
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, Final

import msgspec

_LENGTH: Final = struct.Struct("<I")

MAX_FRAME_BYTES: Final = 1 << 30
"""Longer frames are garbage: a million keys take 34 MB."""


def encode(messages: Iterable[tuple[Any, ...]]) -> bytes:
    """One frame with all of `messages`."""
    body = msgspec.msgpack.encode(list(messages))
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Puts frames together from whatever pieces a stream gives."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._decode = msgspec.msgpack.Decoder(list[list[Any]]).decode

    def feed(self, data: bytes) -> list[list[Any]]:
        """The messages that are complete with `data`, in order; `ValueError` for garbage."""
        self._pending += data
        messages: list[list[Any]] = []
        at = 0
        while len(self._pending) - at >= _LENGTH.size:
            (nbytes,) = _LENGTH.unpack_from(self._pending, at)
            if nbytes > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {nbytes} bytes")
            end = at + _LENGTH.size + nbytes
            if len(self._pending) < end:
                break
            # One copy, so that the buffer can be cut below; the decoder's ValidationError and
            # DecodeError are ValueErrors.
            messages += self._decode(bytes(self._pending[at + _LENGTH.size : end]))
            at = end
        del self._pending[:at]
        return messages
