"""``tierkv verify URL``: read every block of a store and list what cannot be proven."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierkv.cli.output import AsJson, answering, gib, progress_bar

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tierkv.backend import Verification


def verify(
    url: Annotated[str, typer.Argument(help="The store, like nvme:///mnt/kv.")],
    as_json: AsJson = False,
) -> None:
    """Read every block of a store, prove it, and list what fails. Changes nothing.

    Exit status 1 where a block is corrupt or where something could not be read: what a running
    process owns, or what lacks its description.
    """
    with answering(as_json=as_json) as screen:
        found = _verify(url)
        screen.show(_answer(url, found), lambda: _table(url, found), ok=_is_sound(found))


def _verify(url: str) -> Verification:
    import asyncio

    from tierkv.backend import SupportsVerify
    from tierkv.errors import ConfigError
    from tierkv.registry import make_backend

    backend = make_backend(url)
    if not isinstance(backend, SupportsVerify):
        raise ConfigError(
            f"backend {backend.scheme!r} offers nothing to verify from outside; "
            "one that does implements tierkv.backend.SupportsVerify"
        )
    with progress_bar("verify") as progress:
        return asyncio.run(backend.verify(progress))


def _is_sound(found: Verification) -> bool:
    return not found.corrupt and not found.skipped


def _answer(url: str, found: Verification) -> dict[str, Any]:
    return {
        "ok": _is_sound(found),
        "url": url,
        "blocks": found.blocks,
        "bytes": found.payload_bytes,
        "corrupt": [asdict(block) for block in found.corrupt],
        "skipped": [asdict(part) for part in found.skipped],
    }


def _table(url: str, found: Verification) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    verdict = f"{len(found.corrupt)} corrupt" if found.corrupt else "every one proven"
    parts: list[RenderableType] = [
        Text(f"{url}: {found.blocks} blocks read, {gib(found.payload_bytes)}, {verdict}")
    ]
    if found.corrupt:
        table = Table("namespace", "group", "hash", "where", "reason")
        for block in found.corrupt:
            row = (block.namespace, str(block.group), block.hash_hex[:16], block.where)
            table.add_row(*map(Text, (*row, block.reason)))
        parts.append(table)
    parts += [Text(f"NOT READ: {part.directory}: {part.reason}") for part in found.skipped]
    return Group(*parts)
