"""Names of the file backend: from a key to a path and back. Pure.

::

    <root>/
      root-lock       held while somebody looks who owns what
      trash-kv1-…/    a directory whose removal was cut short; goes at the next open
      kv1-<namespace, 64 hex digits>-r<rank>-d<data-parallel rank>/   one owner each
        lock          held by the owner (flock), says who that is
        about.json    the namespace in words, for people
        blocks-<n>/   the blocks; n grows with every clear, the highest counts
          <group>/<first 2 hex digits>/<block hash, 64 hex digits>.kv
        trash-<n>/    what a clear left behind; goes at the next open

A block's file is its 64-byte record, then its payload. The longest component has 73 characters, so
that no model or group name, however long, meets the 255 bytes that file systems allow. The digit
after ``kv`` is the version of this format: a directory of another version is never read.
"""

from __future__ import annotations

import re
from typing import Final

from tierkv.backend import BackendContext
from tierkv.blocks import HASH_BYTES

Key = tuple[int, bytes]

MAX_GROUP: Final = 0xFFFF
SUFFIX: Final = ".kv"
TEMPORARY: Final = ".tmp"

ROOT_LOCK: Final = "root-lock"
TRASH_GLOB: Final = "trash-kv1-*"

_OWNER = re.compile(r"kv1-([0-9a-f]{64})-r(\d+)-d(\d+)")
_BLOCK = re.compile(rf"(\d{{1,5}})/([0-9a-f]{{2}})/([0-9a-f]{{{2 * HASH_BYTES}}})\.kv")


def owner_of(context: BackendContext) -> str:
    """Directory name of one namespace and rank; all 32 bytes of the namespace are in it."""
    return f"kv1-{context.namespace.hex()}-r{context.rank}-d{context.data_parallel_rank}"


def namespace_of(owner: str) -> str | None:
    """The namespace in hex of an owner's directory name; None: it is not one of this format."""
    match = _OWNER.fullmatch(owner)
    return match[1] if match else None


def owner_parts(owner: str) -> tuple[str, int, int] | None:
    """Namespace in hex, rank and data-parallel rank of an owner's directory name."""
    match = _OWNER.fullmatch(owner)
    return (match[1], int(match[2]), int(match[3])) if match else None


def path_of(key: Key) -> str:
    """Path of a block below ``blocks-<n>``."""
    group, block_hash = key
    text = block_hash.hex()
    return f"{group}/{text[:2]}/{text}{SUFFIX}"


def key_of(path: str) -> Key | None:
    """The key whose `path_of` is `path`; None where there is no such key."""
    match = _BLOCK.fullmatch(path)
    if match is None:
        return None
    key = int(match[1]), bytes.fromhex(match[3])
    return key if key[0] <= MAX_GROUP and path_of(key) == path else None
