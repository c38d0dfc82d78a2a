"""``tierkv ls``, ``du`` and ``evict``: look into a store from outside, and give up parts of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierkv.cli.output import AsJson, answering, gib, progress_bar

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tierkv.backend import Eviction, Inspection, StorePart

Url = Annotated[str, typer.Argument(help="The store, like nvme:///mnt/kv.")]

BAR_CELLS = 40
PHYSICAL = ("physical_bytes", "padding_bytes", "dead_bytes", "unused_bytes")
"""What `du` shows beside the payload; the last three and the payload are the first."""


def ls(
    url: Url,
    keys: Annotated[bool, typer.Option("--keys", help="List every block as well.")] = False,
    as_json: AsJson = False,
) -> None:
    """List who stored what: namespaces, ranks, groups, blocks. Changes nothing, reads no payload.

    A store in use can be listed. Exit status 1 where a part of it could not be read. With --keys
    a line per block follows, written as it is found: group, hash, bytes, place.
    """
    with answering(as_json=as_json) as screen:
        found = _inspect(url)
        answer = _answer(url, found) | {"parts": [_part(p, keys=keys) for p in found.parts]}
        lines = _lines(found) if keys else ()
        screen.show(answer, lambda: _listing(found), ok=not found.unreadable, lines=lines)


def du(url: Url, as_json: AsJson = False) -> None:
    """Show where a store's physical bytes go, part by part and in total.

    Changes nothing, reads no payload.
    """
    with answering(as_json=as_json) as screen:
        found = _inspect(url)
        answer = _answer(url, found) | {"parts": [_part(p) for p in found.parts]}
        screen.show(answer, lambda: _usage(found), ok=not found.unreadable)


def evict(
    url: Url,
    namespace: Annotated[
        str | None, typer.Option(help="Only what is of this one: its text or its whole digest.")
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            help="Until the store takes at most this much, like 100GiB; with --namespace: until "
            "that namespace does."
        ),
    ] = "",
    everything: Annotated[bool, typer.Option("--all", help="All of it.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Give up the coldest blocks of owners that do not run. They are misses from then on.

    With --namespace only its blocks go, and --to is compared with what it takes, on all its ranks,
    whatever others take. Blocks of a running owner count, but stay: exit status 1 where therefore
    not all that was asked for is gone.
    """
    with answering(as_json=as_json) as screen:
        done = _evict(url, namespace, to, everything=everything, yes=yes)
        answer = {
            "ok": not done.skipped,
            "url": url,
            "physical_bytes": done.physical_bytes,
            "left_bytes": done.left_bytes,
            "evicted": [asdict(part) for part in done.evicted],
            "skipped": [asdict(part) for part in done.skipped],
        }
        screen.show(answer, lambda: _evicted(done, namespace), ok=not done.skipped)


def _inspect(url: str) -> Inspection:
    import asyncio

    from tierkv.backend import SupportsInspect
    from tierkv.errors import ConfigError
    from tierkv.registry import make_backend

    backend = make_backend(url)
    if not isinstance(backend, SupportsInspect):
        raise ConfigError(
            f"backend {backend.scheme!r} cannot be listed from outside; "
            "one that can implements tierkv.backend.SupportsInspect"
        )
    return asyncio.run(backend.inspect())


def _evict(url: str, namespace: str | None, to: str, *, everything: bool, yes: bool) -> Eviction:
    import asyncio

    from tierkv.backend import SupportsEvict
    from tierkv.errors import ConfigError
    from tierkv.registry import make_backend
    from tierkv.urls import parse_size

    if bool(to) == everything:
        raise ConfigError("write how much is to go: either --to SIZE, like --to 100GiB, or --all")
    keep_bytes = 0 if everything else parse_size(to, "--to")
    backend = make_backend(url)
    if not isinstance(backend, SupportsEvict):
        raise ConfigError(
            f"backend {backend.scheme!r} gives up nothing from outside; "
            "one that does implements tierkv.backend.SupportsEvict"
        )
    digest = None if namespace is None else _digest(url, namespace)
    if not yes:
        _confirm(url, namespace, "everything" if everything else f"all above {gib(keep_bytes)}")
    with progress_bar("evict") as progress:
        return asyncio.run(backend.evict(progress, namespace=digest, keep_bytes=keep_bytes))


def _digest(url: str, namespace: str) -> bytes:
    """The namespace that a user means by its text or its digest."""
    from tierkv.errors import ConfigError

    known = {p.namespace_hex: p.namespace for p in _inspect(url).parts if p.namespace_hex}
    meant = [h for h, text in known.items() if namespace and namespace in (text, h)]
    if len(meant) != 1:
        which = "is not in" if not meant else f"names {len(meant)} namespaces of"
        raise ConfigError(
            f"--namespace {namespace!r} {which} {url}; write one that `tierkv ls` shows, or the "
            "digest that its --json does"
        )
    return bytes.fromhex(meant[0])


def _confirm(url: str, namespace: str | None, what: str) -> None:
    import sys

    from tierkv.errors import ConfigError

    if not sys.stdin.isatty():
        raise ConfigError("nothing was given up: write --yes where nobody can be asked")
    where = f"{url}, namespace {namespace}" if namespace else url
    typer.confirm(f"Give up {what} of {where}?", abort=True, err=True)


def _answer(url: str, found: Inspection) -> dict[str, Any]:
    return {
        "ok": not found.unreadable,
        "url": url,
        "blocks": sum(part.blocks for part in found.parts),
        "payload_bytes": sum(part.payload_bytes for part in found.parts),
        **{name: sum(getattr(part, name) for part in found.parts) for name in PHYSICAL},
        "capacity_bytes": found.capacity_bytes,
        "free_bytes": found.free_bytes,
        "unreadable": [asdict(part) for part in found.unreadable],
    }


def _part(part: StorePart, *, keys: bool = False) -> dict[str, Any]:
    names = ("directory", "namespace", "namespace_hex", "rank", "data_parallel_rank", "owner")
    sizes = ("blocks", "payload_bytes", *PHYSICAL)
    more = ("owner_pid", "oldest_use_s", "newest_use_s", "problem")
    told = {name: getattr(part, name) for name in (*names, *sizes, *more)}
    told["groups"] = [asdict(group) for group in part.groups]
    if keys:
        told["keys"] = (place._asdict() for place in part.listing)
    return told


def _when(seconds: float | None) -> str:
    from datetime import UTC, datetime

    if seconds is None:
        return "-"
    return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M")


def _lines(found: Inspection) -> Iterator[str]:
    for part in found.parts:
        for place in part.listing:
            yield f"{place.group} {place.hash_hex} {place.nbytes} {place.where}"


def _listing(found: Inspection) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table("namespace", "rank", "group", "blocks", "payload", "used", "owner")
    for part in found.parts:
        rank = f"{part.rank}" + (f" dp{part.data_parallel_rank}" if part.data_parallel_rank else "")
        used = f"{_when(part.oldest_use_s)} to {_when(part.newest_use_s)}"
        name = part.namespace or part.directory
        told = (used, part.problem or part.owner or "nobody")
        for group in part.groups or (None,):
            n, size = (f"{group.blocks:,}", gib(group.payload_bytes)) if group else ("0", "0 B")
            row = (name, rank, str(group.group) if group else "-", n, size, *told)
            table.add_row(*map(Text, row))
    return Group(table, *_unread(found))


def _unread(found: Inspection) -> list[RenderableType]:
    from rich.text import Text

    return [Text(f"NOT READ: {part.directory}: {part.reason}") for part in found.unreadable]


def _usage(found: Inspection) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    answer = _answer("", found)
    names = ("physical_bytes", "payload_bytes", *PHYSICAL[1:])
    total = [gib(answer[name]) for name in names] if len(found.parts) > 1 else []
    heads = ("physical", "payload", "padding", "dead", "unused")
    table = Table("namespace", "rank", show_footer=bool(total))
    table.columns[0].footer = "total"
    for head, footer in zip_longest(heads, total, fillvalue=""):
        table.add_column(head, footer, justify="right")
    table.add_column("")
    for part in found.parts:
        sizes = (gib(getattr(part, name)) for name in names)
        row = (part.namespace or part.directory, str(part.rank), *sizes)
        table.add_row(*map(Text, row), _bar(part))
    quota = Text(
        f"{gib(answer['physical_bytes'])} of a quota of {gib(found.capacity_bytes)}; "
        f"{gib(found.free_bytes)} free on the file system"
    )
    return Group(table, quota, *_unread(found))


def _bar(part: StorePart) -> Any:
    """Payload, waste and unused space of a part as one line."""
    from rich.text import Text

    whole = max(part.physical_bytes, 1)
    payload = round(BAR_CELLS * part.payload_bytes / whole)
    waste = round(BAR_CELLS * (part.padding_bytes + part.dead_bytes) / whole)
    waste = min(waste, BAR_CELLS - payload)
    return Text.assemble(
        ("█" * payload, "green"),
        ("▒" * waste, "yellow"),
        ("·" * (BAR_CELLS - payload - waste), "dim"),
    )


def _evicted(done: Eviction, namespace: str | None) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    lines = [
        Text(f"{part.namespace or part.directory}: gave up {gib(part.freed_bytes)}")
        for part in done.evicted
    ]
    lines += [Text(f"STAYS: {part.directory}: {part.reason}") for part in done.skipped]
    left = "" if namespace is None else f"namespace {namespace} takes {gib(done.left_bytes)}, "
    return Group(*lines, Text(f"{left}the store takes {gib(done.physical_bytes)} now"))
