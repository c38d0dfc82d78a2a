"""Saves and loads on behalf of callers who may go away, and the copies they need.

A job runs to its end even if its caller is cancelled, so the books are always settled; and a
cancelled caller waits for a copy that is under way, so nobody's pages are touched after it knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import operator
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv.blocks import Move, MoveKind
from tierkv.completions import Completions
from tierkv.copier import Copier, Copy
from tierkv.device import Pages
from tierkv.hashing import NO_EXTRAS, Extras, HashChain, TokenIds, chain
from tierkv.host import HostArena
from tierkv.layout import Layout
from tierkv.pinned import Arena
from tierkv.record import seeds
from tierkv.streams import Device, Mark, Queue, device_for

log = logging.getLogger("tierkv")

_T = TypeVar("_T")

BlockIds = Mapping[str, Sequence[int | None]]
"""Group name to a table: entry i is the row (dim 0) of your tensors that holds the prompt's block
i, or None where there is none. A table may be shorter than the prompt."""

Prompt = TokenIds | HashChain
"""Token ids of a prompt, or their chain where it was made before (`Cache.chain`)."""

_HUNG: list[Jobs] = []
"""Their device did not end its copies: it may touch their memory until the process ends."""


PageTensors = Pages | Mapping[str, Sequence[torch.Tensor]]
"""Compiled pages (faster), or group name to tensors as `tierkv.device.Pages` takes them."""


@dataclass(slots=True)
class Job:
    """One save or load.

    pages: the caller's. after: behind what the caller had launched on them when it asked.
    abandoned: its caller has gone.
    """

    pages: Pages
    after: Mark
    abandoned: bool = False
    copying: asyncio.Future[Copy | None] | None = None


class Jobs:
    """Runs jobs on the running loop, and launches their copies in a thread of its own.

    On a CPU launching is copying. On a GPU the copies run on, several at a time, and a second
    thread for each direction waits for their ends.

    arena: its memory. block_bytes: of each group.
    device_checksums: sum the blocks of a save where the pages are.
    """

    def __init__(
        self, arena: Arena, block_bytes: Sequence[int], *, device_checksums: bool = False
    ) -> None:
        self._sums = device_checksums
        self._arena = HostArena(arena, block_bytes)
        self._devices: dict[torch.device, Device] = {}
        self._copiers: dict[Device, Copier] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tierkv-copy")
        self._ends = {
            MoveKind.SAVE: Completions("tierkv-saved"),
            MoveKind.LOAD: Completions("tierkv-loaded"),
        }
        self._running: set[asyncio.Task[Any]] = set()

    def job(self, pages: Pages) -> Job:
        """A job whose copies come after everything that this thread has launched so far."""
        device = self._devices.get(pages.device)
        if device is None:
            device = self._devices[pages.device] = device_for(pages.device)
        return Job(pages, device.record(Queue.ENGINE))

    def stats(self) -> dict[str, Any]:
        """What `HostArena.stats` says."""
        return self._arena.stats()

    async def run(self, job: Job, work: Coroutine[Any, Any, _T]) -> _T:
        """Await `work`; if cancelled, leave it to end by itself once no copy is under way.

        However often it is cancelled, a copy that is under way is waited for.
        """
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            job.abandoned = True
            task.add_done_callback(_take_note)
            while job.copying is not None and not job.copying.done():
                # Cancelled again: it is raised below all the same.
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({job.copying})
            raise

    async def copy(self, job: Job, move: Move, rows: NDArray[np.intp]) -> Copy | None:
        """Copy these rows of a move, as its kind is, and return when the copy has ended.

        None, and nothing touched, if the job was abandoned before. Raises what the copy raises.
        """

        def launch_sync() -> Copy | None:
            return None if job.abandoned else self._launch_sync(job, move, rows)

        async def launch_and_wait() -> Copy | None:
            loop = asyncio.get_running_loop()
            launched = await loop.run_in_executor(self._thread, launch_sync)
            if launched is not None:
                await self._ends[move.kind].wait(launched.end)
            return launched

        job.copying = asyncio.create_task(launch_and_wait())
        return await job.copying

    def _launch_sync(self, job: Job, move: Move, rows: NDArray[np.intp]) -> Copy:
        copier = self._copier_sync(job)
        what = job.pages, move.keys.groups[rows], move.block_ids[rows], move.offsets[rows]
        if move.kind is MoveKind.LOAD:
            return copier.load(*what, after=job.after)
        sums = seeds(move.keys.take(rows)) if self._sums else None
        return copier.save(*what, after=job.after, seeds=sums)

    def _copier_sync(self, job: Job) -> Copier:
        """The copier of a job's device. The first for a GPU registers the arena, which blocks."""
        device = self._devices[job.pages.device]
        copier = self._copiers.get(device)
        if copier is None:
            cuts = self._arena.register_sync(job.pages.device)
            copier = self._copiers[device] = Copier(self._arena.memory, device, cuts=cuts)
        return copier

    async def close(self, *, deadline_s: float) -> bool:
        """Wait for the jobs that run, then end the thread; whether they ended within `deadline_s`.

        False where the device does not end their copies: then the arena must stay where it is.
        """
        if self._running:
            _, hung = await asyncio.wait(self._running, timeout=deadline_s)
            if hung:
                log.error("tierkv: %d copies have not ended; their memory stays taken", len(hung))
                _HUNG.append(self)
                return False
        for ends in self._ends.values():
            ends.close()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._arena.unregister_sync)
        self._thread.shutdown(wait=False)
        return True


def _take_note(task: asyncio.Task[Any]) -> None:
    """Nobody is left to be told: an abandoned job's error is read, not raised."""
    if not task.cancelled():
        task.exception()


async def create_arena(nbytes: int) -> Arena:
    """`Arena.create` in a thread. If cancelled: it is closed again as soon as it is there."""
    create = partial(Arena.create, nbytes, prefault=True)
    making = asyncio.get_running_loop().run_in_executor(None, create)
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(_close_unwanted)
        raise


def _close_unwanted(making: asyncio.Future[Arena]) -> None:
    if not making.cancelled() and making.exception() is None:
        making.result().close()


def prompt_chain(layout: Layout, prompt: Prompt, extras: Extras) -> HashChain:
    """The prompt's block hashes; `ValueError` for a chain that does not fit layout or extras."""
    if not isinstance(prompt, HashChain):
        return chain(prompt, layout.hash_block_tokens, extras=extras)
    if extras is not NO_EXTRAS:
        raise ValueError("extras belong to the chain: give them to `Cache.chain`")
    if prompt.unit != layout.hash_block_tokens:
        raise ValueError(
            f"the chain hashes {prompt.unit} tokens at a time, the layout "
            f"{layout.hash_block_tokens}; make it with `Cache.chain`"
        )
    return prompt


def compiled(layout: Layout, pages: PageTensors) -> Pages:
    """The pages, compiled if they are not yet."""
    return pages if isinstance(pages, Pages) else Pages(layout, pages)


def _block_ids(group: str, table: Sequence[int | None]) -> list[int | None]:
    ids: list[int | None] = []
    # The usual table, of ints alone, is checked at once.
    ints = [entry for entry in table if type(entry) is int]
    if ints and len(ints) == len(table) and min(ints) >= 0 and max(ints) < 2**31:
        return [*ints]
    for at, entry in enumerate(table):
        try:
            block_id = None if entry is None else operator.index(entry)
        except TypeError:
            block_id = -1
        if block_id is not None and not 0 <= block_id < 2**31:
            raise ValueError(
                f"group {group!r}: entry {at} is {entry!r}; write a block id from 0 up, or None"
            )
        ids.append(block_id)
    return ids


def block_tables(
    layout: Layout, blocks: BlockIds, needed: Mapping[str, range]
) -> list[list[int | None]]:
    """One table a group, in the layout's order.

    Raises `LayoutError` for an unknown group; `ValueError` for an entry that is no block id, and
    where a block of `needed` has no page or shares it with another.
    """
    for name in blocks:
        layout.index_of(name)
    tables = [_block_ids(g.name, blocks.get(g.name, ())) for g in layout.groups]
    for name, wanted in needed.items():
        table = tables[layout.index_of(name)]
        pages = table[wanted.start : wanted.stop]
        if len(set(pages)) < len(pages) and None not in pages:
            raise ValueError(f"group {name!r}: two blocks of the hit have the same page")
        if len(table) < wanted.stop or None in table[wanted.start : wanted.stop]:
            raise ValueError(
                f"group {name!r}: the hit fills blocks {wanted.start} to {wanted.stop - 1}, "
                f"but the table of {len(table)} entries has no page for one of them"
            )
    return tables
