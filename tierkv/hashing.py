"""Token ids to a chain of block hashes: SHA-256, the same in every process and on every machine.

The hash of unit ``i`` of a prompt covers everything that decides the KV of the tokens up to its
end: the root, all earlier units (through the parent hash), its own token ids, and the extra keys
that apply to it::

    hash[i] = SHA-256( parent[i] || tokens[i] || extras[i] )      parent[0] = root
                                                                  parent[i] = hash[i - 1]

- parent and root: 32 bytes.
- tokens: unit ids, each an unsigned 32-bit little-endian number, so no two lists of ids of the
  same length have the same bytes.
- extras: for each key a tag (1 byte), the length of its value (8 bytes, little endian) and the
  value, in a fixed order; nothing where there are none. Tags and lengths keep a salt 'X' apart from
  an adapter 'X', and ('ab', 'c') from ('a', 'bc').

A block of several units is named by the hash of its last unit (`tierkv.reach.block_hash_index`).
In vLLM the engine's own hashes are used instead; the namespace says which.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tierkv.blocks import HASH_BYTES

ALGORITHM: Final = "tierkv-sha256-1"
"""Names this chain in a namespace. Changes whenever the bytes that are hashed change."""

ROOT: Final = hashlib.sha256(b"tierkv block hash chain, version 1").digest()
"""The parent of the first unit where no other root is given."""

TokenIds = Sequence[int] | NDArray[np.integer[Any]]

_ADAPTER, _SALT, _IMAGE = 1, 2, 3
_LARGEST_ID: Final = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Extras:
    """What besides token ids decides the KV of a prompt.

    adapter: name and version of a LoRA adapter, such that other weights have another text. Applies
        to the whole prompt.
    salt: separates those who must not share (tenants). Applies to the whole prompt.
    images: (position of its first placeholder token, content hash) of each image, video or sound.
        Applies from the unit that holds that position on; units before it do not change.
    """

    adapter: str = ""
    salt: str = ""
    images: tuple[tuple[int, bytes], ...] = ()

    def __post_init__(self) -> None:
        for position, _ in self.images:
            if position < 0:
                raise ValueError(f"image position {position} is negative; write a token position")
        object.__setattr__(self, "images", tuple(sorted(self.images)))


NO_EXTRAS: Final = Extras()


def _field(tag: int, value: bytes) -> bytes:
    return bytes([tag]) + len(value).to_bytes(8, "little") + value


def _whole_prompt(extras: Extras) -> bytes:
    """The fields of the first unit; every later unit inherits them through its parent."""
    out = b""
    if extras.adapter:
        out += _field(_ADAPTER, extras.adapter.encode())
    if extras.salt:
        out += _field(_SALT, extras.salt.encode())
    return out


def _images_by_unit(extras: Extras, unit: int) -> dict[int, bytes]:
    fields: dict[int, bytes] = {}
    for position, content in extras.images:
        offset = (position % unit).to_bytes(8, "little")
        fields[position // unit] = fields.get(position // unit, b"") + _field(
            _IMAGE, offset + content
        )
    return fields


def _token_bytes(tokens: TokenIds, first_position: int) -> bytes:
    """The ids as little-endian uint32; `ValueError` names the position of one that does not fit."""
    if not len(tokens):
        return b""
    ids = np.asarray(tokens)
    if ids.ndim != 1:
        raise ValueError(f"token ids have {ids.ndim} dimensions; write one list of ids")
    if ids.dtype.kind not in "iu" or int(ids.min()) < 0 or int(ids.max()) > _LARGEST_ID:
        # Mixed or huge numbers make numpy choose another type, so look at what was written.
        for at, token in enumerate(tokens):
            whole = isinstance(token, int | np.integer) and not isinstance(token, bool)
            if not whole or not 0 <= token <= _LARGEST_ID:
                raise ValueError(
                    f"token id {token!r} at position {first_position + at} is not a whole number "
                    f"in 0..{_LARGEST_ID}"
                )
    return ids.astype("<u4").tobytes()


class HashChain:
    """The block hashes of one growing prompt: one 32-byte hash per full unit.

    Not thread-safe. A prompt that was shortened needs a new chain: hashes are never taken back.
    """

    __slots__ = ("_images", "_parent", "_pending", "_prompt", "hashes", "tokens", "unit")

    def __init__(self, unit: int, *, extras: Extras = NO_EXTRAS, root: bytes = ROOT) -> None:
        if unit < 1:
            raise ValueError(f"unit is {unit} tokens; write 1 or more")
        if len(root) != HASH_BYTES:
            raise ValueError(f"root has {len(root)} bytes; write {HASH_BYTES}")
        self.unit = unit
        """Tokens per hash."""
        self.tokens = 0
        """Tokens taken so far; the last `tokens % unit` are in no hash yet."""
        self.hashes: list[bytes] = []
        """One hash per full unit, in order."""
        self._parent = root
        self._pending = b""
        self._prompt = _whole_prompt(extras)
        self._images = _images_by_unit(extras, unit)

    def extend(self, tokens: TokenIds) -> None:
        """Take the next token ids; the result is that of one call with all of them.

        Raises `ValueError` for an id outside 0..2**32-1, and takes none of them then.
        """
        data = self._pending + _token_bytes(tokens, self.tokens)
        self.tokens += len(tokens)
        width = 4 * self.unit
        done = len(data) // width * width
        view = memoryview(data)
        sha256, images, parent, out = hashlib.sha256, self._images, self._parent, self.hashes
        for start in range(0, done, width):
            digest = sha256(parent)
            digest.update(view[start : start + width])
            if not out and self._prompt:
                digest.update(self._prompt)
            if images and (image := images.get(len(out))):
                digest.update(image)
            parent = digest.digest()
            out.append(parent)
        self._parent = parent
        self._pending = data[done:]


def chain(
    tokens: TokenIds, unit: int, *, extras: Extras = NO_EXTRAS, root: bytes = ROOT
) -> HashChain:
    """The chain of block hashes of a prompt.

    tokens: the ids, a sequence of int or an integer array.
    unit: tokens per hash (`Layout.hash_block_tokens`).
    extras: what else decides the KV.
    root: 32 bytes, parent of the first unit; part of the namespace where it is not `ROOT`.
    Raises `ValueError` for an id outside 0..2**32-1 and names its position.
    """
    made = HashChain(unit, extras=extras, root=root)
    made.extend(tokens)
    return made
