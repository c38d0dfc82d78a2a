"""The promises of `tierkv.backend` about answers and keys, one test each."""

# ruff: noqa: D102 - the name of a test is its sentence

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import ClassVar, Final

import pytest

from tierkv import registry
from tierkv.backend import Backend, SupportsLengths, Usage
from tierkv.blocks import Keys, Outcome
from tierkv.errors import StoreBusyError
from tierkv.testing.batches import (
    Key,
    agree_at_once,
    assert_same,
    empty_batch,
    load,
    make_batch,
    make_blocks,
    make_context,
    make_key,
    make_payload,
    save,
    sizes,
)

BLOCK_BYTES: Final = (1, 511, 512, 4096, 100 * 1024, 1 << 20)
"""Payload bytes per block of the groups that most tests use."""
SMALL: Final = (0, 1, 2, 3)
"""Groups of `BLOCK_BYTES` up to one page."""


async def contained(backend: Backend, keys: Sequence[Key]) -> list[bool]:
    """`contains` as a list."""
    mask = await backend.contains(Keys.of(keys))
    answer: list[bool] = mask.tolist()
    return answer


async def scanned(backend: Backend) -> list[Key]:
    """Everything `scan` lists, sorted."""
    return sorted([key async for keys in backend.scan() for key in keys])


class ContractBase:
    """What a subclass says about its backend; see `tierkv.testing.BackendContract`."""

    survives_reopen: ClassVar[bool] = True
    exclusive: ClassVar[bool] = True

    def url(self, directory: pathlib.Path) -> str:
        """Tier URL of a backend that keeps its things in `directory`, with room for 64 MiB."""
        raise NotImplementedError("say url(directory), or make_backend(directory)")

    def small_url(self, directory: pathlib.Path) -> str | None:
        """Tier URL with the smallest sensible capacity, below 64 MiB; None: there is no quota."""
        del directory
        return None

    def make_backend(self, directory: pathlib.Path) -> Backend:
        """A backend that is not open. By default, what the registry makes of `url`."""
        return registry.make_backend(self.url(directory))

    @contextlib.asynccontextmanager
    async def opened(
        self,
        directory: pathlib.Path,
        *,
        block_bytes: Sequence[int] = BLOCK_BYTES,
        namespace: bytes = b"\x01" * 32,
        rank: int = 0,
        data_parallel_rank: int = 0,
        retire: Callable[[Keys], Awaitable[None]] = agree_at_once,
        url: str | None = None,
    ) -> AsyncIterator[Backend]:
        """An open backend, closed at the end."""
        backend = registry.make_backend(url) if url else self.make_backend(directory)
        try:
            await backend.open(
                make_context(
                    block_bytes,
                    namespace=namespace,
                    rank=rank,
                    data_parallel_rank=data_parallel_rank,
                    retire=retire,
                )
            )
            yield backend
        finally:
            await backend.close()


class AnswerPromises(ContractBase):
    """Results per key, and one answer whichever way one asks."""

    async def test_what_was_written_is_read_back(self, tmp_path: pathlib.Path) -> None:
        blocks = make_blocks(12, BLOCK_BYTES)
        async with self.opened(tmp_path) as backend:
            assert set((await save(backend, blocks)).values()) == {Outcome.DONE}
            assert_same(await load(backend, sizes(blocks)), blocks)

    async def test_many_groups_with_equal_hashes_stay_apart(self, tmp_path: pathlib.Path) -> None:
        block_bytes = [64 + group for group in range(64)]
        keys = [make_key(7, group) for group in range(64)]
        blocks = {key: make_payload(key, block_bytes[key[0]]) for key in keys}
        async with self.opened(tmp_path, block_bytes=block_bytes) as backend:
            await save(backend, blocks)
            assert_same(await load(backend, sizes(blocks)), blocks)

    async def test_records_come_back_as_they_were(self, tmp_path: pathlib.Path) -> None:
        blocks = make_blocks(6, BLOCK_BYTES)
        async with self.opened(tmp_path) as backend:
            written = make_batch(blocks)
            await backend.write(written)
            read = empty_batch(sizes(blocks))
            await backend.read(read)
            assert read.records.tobytes() == written.records.tobytes()

    async def test_a_record_is_opaque_to_the_backend(self, tmp_path: pathlib.Path) -> None:
        blocks = make_blocks(4, BLOCK_BYTES, groups=SMALL)
        async with self.opened(tmp_path) as backend:
            written = make_batch(blocks)
            written.records["algorithm"] = 77  # one that is not invented yet
            written.records["checksum"] = 1
            await backend.write(written)
            read = empty_batch(sizes(blocks))
            assert (await backend.read(read)).tolist() == [Outcome.DONE] * 4
            assert read.records.tobytes() == written.records.tobytes()

    async def test_one_missing_key_fails_only_itself(self, tmp_path: pathlib.Path) -> None:
        blocks = make_blocks(7, BLOCK_BYTES, groups=SMALL)
        absent = list(blocks)[3]
        present = {key: data for key, data in blocks.items() if key != absent}
        async with self.opened(tmp_path) as backend:
            await save(backend, present)
            assert_same(await load(backend, sizes(blocks)), {**blocks, absent: Outcome.MISSING})
            assert await contained(backend, list(blocks)) == [key != absent for key in blocks]

    async def test_a_key_never_written_is_missing_and_its_buffer_untouched(
        self, tmp_path: pathlib.Path
    ) -> None:
        async with self.opened(tmp_path) as backend:
            batch = empty_batch({make_key(i, g): BLOCK_BYTES[g] for i, g in enumerate(SMALL)})
            before = bytes(batch.arena)
            assert (await backend.read(batch)).tolist() == [Outcome.MISSING] * len(SMALL)
            assert bytes(batch.arena) == before

    async def test_writing_an_existing_key_succeeds_and_changes_nothing(
        self, tmp_path: pathlib.Path
    ) -> None:
        first = make_blocks(3, BLOCK_BYTES, groups=SMALL)
        again = make_blocks(5, BLOCK_BYTES, groups=SMALL, variant=1)
        async with self.opened(tmp_path) as backend:
            await save(backend, first)
            assert set((await save(backend, again)).values()) == {Outcome.DONE}
            assert_same(await load(backend, sizes(again)), {**again, **first})
            assert (await backend.usage()).blocks == len(again)

    async def test_two_writes_of_one_key_at_once_both_succeed(self, tmp_path: pathlib.Path) -> None:
        blocks = make_blocks(8, BLOCK_BYTES)
        async with self.opened(tmp_path) as backend:
            answers = await asyncio.gather(*(save(backend, blocks) for _ in range(4)))
            assert all(set(a.values()) == {Outcome.DONE} for a in answers)
            assert_same(await load(backend, sizes(blocks)), blocks)
            usage = await backend.usage()
            assert (usage.blocks, usage.payload_bytes) == (8, sum(sizes(blocks).values()))

    async def test_contains_knows_at_once_what_write_and_delete_did(
        self, tmp_path: pathlib.Path
    ) -> None:
        blocks = make_blocks(6, BLOCK_BYTES, groups=SMALL)
        keys = list(blocks)
        async with self.opened(tmp_path) as backend:
            assert await contained(backend, keys) == [False] * 6
            await save(backend, blocks)
            assert await contained(backend, keys) == [True] * 6
            await backend.delete(Keys.of(keys[::2]))
            assert await contained(backend, keys) == [False, True] * 3

    async def test_a_deleted_key_is_missing_and_can_be_written_anew(
        self, tmp_path: pathlib.Path
    ) -> None:
        blocks = make_blocks(4, BLOCK_BYTES, groups=SMALL)
        anew = make_blocks(4, BLOCK_BYTES, groups=SMALL, variant=1)
        gone = list(blocks)[1]
        async with self.opened(tmp_path) as backend:
            await save(backend, blocks)
            await backend.delete(Keys.of([gone, make_key(999)]))
            assert_same(await load(backend, sizes(blocks)), {**blocks, gone: Outcome.MISSING})
            await save(backend, {gone: anew[gone]})
            assert (await load(backend, sizes(blocks)))[gone] == anew[gone]

    @pytest.mark.parametrize("change", [-1, 1, 4096])
    async def test_a_block_of_another_length_is_missing(
        self, tmp_path: pathlib.Path, change: int
    ) -> None:
        blocks = make_blocks(4, BLOCK_BYTES, groups=[2, 3])
        other = {key: n + change for key, n in sizes(blocks).items()}
        async with self.opened(tmp_path) as backend:
            await save(backend, blocks)
            assert set((await load(backend, other)).values()) == {Outcome.MISSING}

    async def test_blocks_may_be_shorter_than_their_group_says_and_their_lengths_are_known(
        self, tmp_path: pathlib.Path
    ) -> None:
        longest = make_blocks(12, BLOCK_BYTES, groups=range(1, 6))
        blocks = {
            k: data[: 1 + len(data) // (2 + i)] for i, (k, data) in enumerate(longest.items())
        }
        absent = make_key(999)
        expected = [*map(len, blocks.values()), 0]
        keys = Keys.of([*blocks, absent])
        async with self.opened(tmp_path) as backend:
            if not isinstance(backend, SupportsLengths):
                pytest.skip("no lengths: every block is as long as its group says")
            assert (await backend.lengths(keys)).tolist() == [0] * 13
            await save(backend, blocks)
            assert (await backend.lengths(keys)).tolist() == expected
            assert_same(await load(backend, sizes(blocks)), blocks)
            assert set((await load(backend, sizes(longest))).values()) == {Outcome.MISSING}
            usage = await backend.usage()
            assert usage.payload_bytes == sum(expected)
        async with self.opened(tmp_path) as backend:
            assert isinstance(backend, SupportsLengths)
            kept = expected if self.survives_reopen else [0] * 13
            assert (await backend.lengths(keys)).tolist() == kept
            await backend.clear()
            assert (await backend.lengths(keys)).tolist() == [0] * 13

    async def test_an_empty_batch_is_fine_everywhere(self, tmp_path: pathlib.Path) -> None:
        async with self.opened(tmp_path) as backend:
            assert await save(backend, {}) == {}
            assert_same(await load(backend, {}), {})
            assert await contained(backend, []) == []
            await backend.delete(Keys.of([]))
            assert await scanned(backend) == []

    async def test_scan_lists_exactly_what_contains_says(self, tmp_path: pathlib.Path) -> None:
        blocks = make_blocks(300, [16, 24])
        keys = list(blocks)
        async with self.opened(tmp_path, block_bytes=[16, 24]) as backend:
            await save(backend, blocks)
            await backend.delete(Keys.of(keys[100:200]))
            assert await scanned(backend) == sorted(keys[:100] + keys[200:])
            assert await contained(backend, keys) == [True] * 100 + [False] * 100 + [True] * 100

    async def test_usage_adds_up(self, tmp_path: pathlib.Path) -> None:
        blocks = make_blocks(6, BLOCK_BYTES)
        async with self.opened(tmp_path) as backend:
            empty = await backend.usage()
            assert (empty.blocks, empty.payload_bytes) == (0, 0)
            await save(backend, blocks)
            self._check_usage(await backend.usage(), blocks)
            gone = list(blocks)[0::2]
            await backend.delete(Keys.of(gone))
            self._check_usage(
                await backend.usage(), {k: v for k, v in blocks.items() if k not in gone}
            )

    @staticmethod
    def _check_usage(usage: Usage, blocks: dict[Key, bytes]) -> None:
        assert usage.blocks == len(blocks)
        assert usage.payload_bytes == sum(sizes(blocks).values())
        assert usage.physical_bytes >= usage.payload_bytes
        assert usage.capacity_bytes == 0 or usage.physical_bytes <= usage.capacity_bytes


class LifetimePromises(ContractBase):
    """Whose blocks they are, and how long they stay."""

    @pytest.mark.parametrize(
        "other",
        [
            pytest.param({"namespace": b"\x02" * 32}, id="namespace"),
            pytest.param({"namespace": b"\x01" * 31 + b"\x02"}, id="namespace-last-byte"),
            pytest.param({"rank": 1}, id="rank"),
            pytest.param({"data_parallel_rank": 1}, id="data-parallel-rank"),
        ],
    )
    async def test_equal_hashes_of_two_owners_never_meet(
        self, tmp_path: pathlib.Path, other: dict[str, bytes]
    ) -> None:
        mine = make_blocks(4, BLOCK_BYTES, groups=SMALL)
        theirs = make_blocks(4, BLOCK_BYTES, groups=SMALL, variant=1)
        async with (
            self.opened(tmp_path) as a,
            self.opened(tmp_path, **other) as b,  # type: ignore[arg-type] # one of three keywords
        ):
            await save(a, mine)
            assert await contained(b, list(mine)) == [False] * 4
            assert set((await load(b, sizes(mine))).values()) == {Outcome.MISSING}
            await save(b, theirs)
            assert_same(await load(a, sizes(mine)), mine)
            assert_same(await load(b, sizes(mine)), theirs)
            await b.clear()
            assert_same(await load(a, sizes(mine)), mine)
            assert await scanned(b) == []

    async def test_what_was_written_is_there_after_a_reopen_or_not_at_all(
        self, tmp_path: pathlib.Path
    ) -> None:
        blocks = make_blocks(12, BLOCK_BYTES)
        deleted = list(blocks)[2]
        async with self.opened(tmp_path) as backend:
            await save(backend, blocks)
            await backend.delete(Keys.of([deleted]))
            before = await backend.usage()
        kept = {k: v for k, v in blocks.items() if k != deleted and self.survives_reopen}
        async with self.opened(tmp_path) as backend:
            found = await load(backend, sizes(blocks))
            assert_same({k: v for k, v in found.items() if v is not Outcome.MISSING}, kept)
            assert await scanned(backend) == sorted(kept)
            after = await backend.usage()
            assert after.blocks == len(kept)
            if self.survives_reopen:
                assert after.payload_bytes == before.payload_bytes

    async def test_clear_forgets_for_good_and_the_store_goes_on(
        self, tmp_path: pathlib.Path
    ) -> None:
        old = make_blocks(6, BLOCK_BYTES)
        new = make_blocks(2, BLOCK_BYTES, first=100)
        async with self.opened(tmp_path) as backend:
            await save(backend, old)
            await backend.clear()
            assert await contained(backend, list(old)) == [False] * 6
            assert (await backend.usage()).blocks == 0
            await save(backend, new)
            assert_same(await load(backend, sizes(new)), new)
        async with self.opened(tmp_path) as backend:
            assert set((await load(backend, sizes(old))).values()) == {Outcome.MISSING}
            assert await scanned(backend) == (sorted(new) if self.survives_reopen else [])

    async def test_close_is_safe_twice_and_before_open(self, tmp_path: pathlib.Path) -> None:
        backend = self.make_backend(tmp_path)
        await backend.close()
        backend = self.make_backend(tmp_path)
        await backend.open(make_context(BLOCK_BYTES))
        await backend.close()
        await backend.close()
        async with self.opened(tmp_path) as again:
            assert await scanned(again) == []

    async def test_a_second_owner_is_refused_and_harms_nothing(
        self, tmp_path: pathlib.Path
    ) -> None:
        if not self.exclusive:
            pytest.skip("several owners may share this store")
        blocks = make_blocks(2, BLOCK_BYTES)
        async with self.opened(tmp_path) as owner:
            await save(owner, blocks)
            second = self.make_backend(tmp_path)
            with pytest.raises(StoreBusyError):
                await second.open(make_context(BLOCK_BYTES))
            await second.close()  # after a failed open
            assert_same(await load(owner, sizes(blocks)), blocks)
        async with self.opened(tmp_path) as backend:
            assert len(await scanned(backend)) == 2

    @pytest.mark.parametrize("nbytes", [1, 511, 512, 513, 4095, 4096, 4097, 100 * 1024, 1 << 20])
    async def test_a_block_may_have_any_size(self, tmp_path: pathlib.Path, nbytes: int) -> None:
        blocks = make_blocks(3, [nbytes])
        async with self.opened(tmp_path, block_bytes=[nbytes]) as backend:
            await save(backend, blocks)
            assert_same(await load(backend, sizes(blocks)), blocks)
