"""The order of copies on a device: whatever runs first of what may, no byte is wrong, and each rule
that `tierkv.copier` names is needed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.blocks import ARENA_ALIGN
from tierkv.copier import Copier, Copy
from tierkv.device import Pages
from tierkv.layout import Group, GroupKind, Layout
from tierkv.streams import CpuDevice, Mark, Queue
from tierkv.testing.fake_device import FakeDevice

LAYOUT = Layout(
    (
        Group(name="kv", kind=GroupKind.FULL, block_tokens=16, block_bytes=3 * 512),
        Group(name="state", kind=GroupKind.RECURRENT, block_tokens=16, block_bytes=2 * 4096),
    )
)
SIZES = (3 * 512, 2 * 4096)
SLOTS = (4096, 8192)
BLOCKS = 6
STAGING = 2 * 8192
ORDERS = list(itertools.permutations(Queue))


@functools.cache
def contents(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the pools hold after the step of this number."""
    noise = torch.Generator().manual_seed(seed)
    shapes = (3, BLOCKS, 512), (BLOCKS, 2 * 4096 + 64)
    kv, state = (torch.randint(0, 256, s, dtype=torch.uint8, generator=noise) for s in shapes)
    return kv, state


class World:
    """Pages, an arena and an engine; what should be where is known in advance."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.kv = torch.zeros(3, BLOCKS, 512, dtype=torch.uint8)  # three layers: a comb
        self.state = torch.zeros(BLOCKS, 2 * 4096 + 64, dtype=torch.uint8)  # padded
        self.arena = torch.zeros(64 * ARENA_ALIGN, dtype=torch.uint8)
        self.pages = Pages(LAYOUT, {"kv": list(self.kv), "state": [self.state[:, :-64]]})
        self.copier = Copier(self.arena, device)

    def fill(self, seed: int) -> None:
        """The engine computes the pages of every block."""
        for pool, noise in zip((self.kv, self.state), contents(seed), strict=True):
            pool.copy_(noise)

    def computes(self, seed: int) -> None:
        self.device.run(Queue.ENGINE, lambda: self.fill(seed))

    def zeroes(self) -> None:
        def work() -> None:
            self.kv.zero_()
            self.state.zero_()

        self.device.run(Queue.ENGINE, work)

    def block(self, group: int, block: int) -> bytes:
        page = self.kv[:, block] if group == 0 else self.state[block, :-64]
        return page.contiguous().numpy().tobytes()

    def slot(self, group: int, offset: int) -> bytes:
        return self.arena[offset : offset + SIZES[group]].numpy().tobytes()


@functools.cache
def truth(seed: int) -> World:
    """A world whose pages were filled with this seed, at once."""
    world = World(FakeDevice(STAGING))
    world.fill(seed)
    return world


Batch = tuple[np.ndarray, np.ndarray, np.ndarray]


def batch(rows: Sequence[tuple[int, int]], start: int = 0, gap: int = 0) -> Batch:
    """(groups, block ids, offsets): slots from `start` on, every third one `gap` bytes apart."""
    offsets, end = [], start
    for n, (group, _) in enumerate(rows):
        end += gap if n % 3 == 2 else 0
        offsets.append(end)
        end += SLOTS[group]
    return (
        np.array([g for g, _ in rows], np.uint16),
        np.array([b for _, b in rows], np.int32),
        np.array(offsets, np.int64),
    )


EVERYTHING = [(1, b) for b in range(BLOCKS)] + [(0, b) for b in range(BLOCKS)]


def right(world: World, expected: World, rows: Batch) -> bool:
    return all(
        world.slot(g, o) == expected.block(g, b)
        for g, b, o in zip(*(column.tolist() for column in rows), strict=True)
    )


def save(world: World, orders: Sequence[Queue]) -> bool:
    """The engine computes, a save is launched, the engine computes the next step at once; the slot
    is given to somebody else as soon as the copy says that it ended. Was every byte right?"""
    rows = batch(EVERYTHING)
    world.computes(1)
    copy = world.copier.save(world.pages, *rows, after=world.copier.mark())
    world.copier.protect(copy)
    world.computes(2)
    return ends_right(world, copy, orders, lambda: right(world, truth(1), rows))


def load(world: World, orders: Sequence[Queue]) -> bool:
    """Pages are zeroed late, a load is launched; when it says that it ended the pages are right."""
    rows = batch(EVERYTHING)
    first = truth(1)
    first.pages.gather(rows[0], rows[1], world.arena, rows[2])
    world.fill(2)
    world.zeroes()
    copy = world.copier.load(world.pages, *rows, after=world.copier.mark())

    def pages_are_right() -> bool:
        return all(world.block(g, b) == first.block(g, b) for g, b in EVERYTHING)

    return ends_right(world, copy, orders, pages_are_right) and pages_are_right()


def ends_right(
    world: World, copy: Copy, orders: Sequence[Queue], is_right: Callable[[], bool]
) -> bool:
    """Run everything; the answer at the first moment at which the copy calls itself done, when its
    slots go to somebody else."""
    seen: list[bool] = []

    def look() -> None:
        if copy.done() and not seen:
            seen.append(is_right())
            world.arena.fill_(0xEE)

    look()
    world.device.finish(orders, look)
    return seen == [True]


@pytest.mark.parametrize("move", [save, load])
def test_in_every_order_of_the_queues_every_byte_is_right(move: Callable[..., bool]) -> None:
    assert all(move(World(FakeDevice(STAGING)), order) for order in ORDERS)


class Careless(FakeDevice):
    """Forgets to hold one queue for another: the rules it is asked for are counted."""

    def __init__(self, forgets: tuple[Queue, Queue]) -> None:
        super().__init__(STAGING)
        self.forgets, self.forgotten = forgets, 0

    def hold(self, queue: Queue, mark: Mark) -> None:
        if (queue, mark.queue) == self.forgets:
            self.forgotten += 1
        else:
            super().hold(queue, mark)


RULES: dict[str, tuple[Callable[..., bool], Queue, Queue]] = {
    "a save that starts before its producer's event": (save, Queue.GATHER, Queue.ENGINE),
    "staging of a save that is reused too early": (save, Queue.GATHER, Queue.OUT),
    "a host copy that starts before its gather": (save, Queue.OUT, Queue.GATHER),
    "source blocks that are reused under a save": (save, Queue.ENGINE, Queue.GATHER),
    "staging of a load that is reused too early": (load, Queue.IN, Queue.SCATTER),
    "a scatter that starts before its host copy": (load, Queue.SCATTER, Queue.IN),
    "a load that is overtaken by a late zeroing": (load, Queue.SCATTER, Queue.ENGINE),
}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_needed_and_its_absence_is_seen(rule: str) -> None:
    move, queue, waits_for = RULES[rule]
    seen = False
    for order in ORDERS:
        device = Careless((queue, waits_for))
        seen = not move(World(device), order)
        assert device.forgotten, "the rule is not asked for at all"
        if seen:
            break
    assert seen, "no order of the queues shows that it is missing"


class Hasty(FakeDevice):
    """Calls what a queue was given done before it ran."""

    def __init__(self, queue: Queue) -> None:
        super().__init__(STAGING)
        self.hasty = queue

    def record(self, queue: Queue) -> Mark:
        mark = super().record(queue)
        return FakeDevice(STAGING).record(queue) if queue is self.hasty else mark


@pytest.mark.parametrize(("move", "queue"), [(save, Queue.OUT), (load, Queue.SCATTER)])
def test_a_slot_that_is_given_away_under_a_copy_is_seen(
    move: Callable[..., bool], queue: Queue
) -> None:
    assert any(not move(World(Hasty(queue)), order) for order in ORDERS)


def test_case_082_a_save_before_its_producers_event_holds_the_producers_bytes() -> None:
    world = World(FakeDevice(STAGING))
    rows = batch([(1, 4), (0, 2)])
    world.computes(1)
    copy = world.copier.save(world.pages, *rows, after=world.copier.mark())
    assert not any(world.device.step(q) for q in Queue if q is not Queue.ENGINE), "too early"
    assert not copy.done()
    world.device.finish()
    assert copy.done()
    assert right(world, truth(1), rows)


def test_case_083_what_was_loaded_outlives_a_zeroing_that_comes_late() -> None:
    world, first = World(FakeDevice(STAGING)), truth(1)
    rows = batch([(0, 5)])
    first.pages.gather(rows[0], rows[1], world.arena, rows[2])
    world.zeroes()
    world.copier.load(world.pages, *rows, after=world.copier.mark())
    world.device.finish([Queue.IN, Queue.SCATTER, Queue.ENGINE, Queue.GATHER, Queue.OUT])
    assert world.block(0, 5) == first.block(0, 5)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_saves_and_loads_side_by_side_end_right_however_the_queues_take_turns(
    data: st.DataObject,
) -> None:
    """Several steps of an engine: each computes, saves, and loads what was saved before into other
    pages, while the queues run whenever hypothesis lets them."""
    world = World(FakeDevice(STAGING))
    cuts = data.draw(st.lists(st.integers(1, 63), max_size=3).map(sorted))
    world.copier = Copier(world.arena, world.device, cuts=[c * ARENA_ALIGN for c in cuts])
    saves: list[tuple[Copy, Batch, World]] = []
    for step in range(data.draw(st.integers(1, 4))):
        world.computes(step)
        blocks = data.draw(st.permutations(EVERYTHING))[: data.draw(st.integers(1, 4))]
        rows = batch(blocks, start=step * 10 * ARENA_ALIGN, gap=ARENA_ALIGN)
        copy = world.copier.save(world.pages, *rows, after=world.copier.mark())
        world.copier.protect(copy)
        saves.append((copy, rows, truth(step)))
        for _ in range(data.draw(st.integers(0, 6))):
            world.device.step(data.draw(st.sampled_from(Queue)))
        for copy, rows, then in saves:
            assert not copy.done() or right(world, then, rows)
    world.device.finish(data.draw(st.permutations(list(Queue))))
    assert all(copy.done() and right(world, then, rows) for copy, rows, then in saves)


def test_a_save_is_declined_behind_a_long_queue_and_welcome_when_it_is_gone() -> None:
    world = World(FakeDevice(STAGING))
    world.copier = Copier(world.arena, world.device, backlog_bytes=2 * 8192)
    assert world.copier.has_room(1 << 40), "one alone may be of any size"
    world.copier.save(world.pages, *batch([(1, 0)]), after=world.copier.mark())
    assert world.copier.has_room(8192)
    assert not world.copier.has_room(8193)
    world.device.finish()
    assert world.copier.has_room(8193)


def test_a_block_larger_than_the_staging_is_copied_all_the_same() -> None:
    world = World(FakeDevice(4096))
    rows = batch([(1, 3), (1, 5), (0, 1)])
    world.fill(1)
    copy = world.copier.save(world.pages, *rows, after=world.copier.mark())
    world.device.finish()
    assert copy.done()
    assert right(world, truth(1), rows)


def test_no_host_copy_spans_a_cut() -> None:
    world = World(FakeDevice(1 << 20))
    [part] = world.pages.parts(*batch([(1, b) for b in range(4)]), world.arena.numel(), 1 << 20)
    cuts = np.array([4096, 8192, 12288 + 512, 1 << 20], np.int64)
    extents = part.extents(cuts)
    assert extents == [
        (0, 0, 4096),
        (4096, 4096, 4096),
        (8192, 8192, 4096 + 512),
        (12288 + 512, 12288 + 512, 4 * 8192 - 12288 - 512),
    ]
    assert part.extents(np.empty(0, np.int64)) == [(0, 0, 4 * 8192)]


HOSTS = [pytest.param(0, id="direct"), pytest.param(STAGING, id="staged")]


@pytest.mark.parametrize("staging_bytes", HOSTS)
def test_on_a_cpu_everything_has_happened_when_a_call_returns(staging_bytes: int) -> None:
    world, device = World(FakeDevice(STAGING)), CpuDevice(staging_bytes)
    copier = Copier(world.arena, device)
    rows = batch(EVERYTHING, gap=ARENA_ALIGN)
    world.fill(1)
    assert copier.save(world.pages, *rows, after=copier.mark()).done()
    assert right(world, truth(1), rows)
    world.fill(2)
    copy = copier.load(world.pages, *rows, after=copier.mark())
    assert copy.done()
    assert copy.nbytes == BLOCKS * sum(SIZES)
    assert all(world.block(g, b) == truth(1).block(g, b) for g, b in EVERYTHING[::5])


@pytest.mark.parametrize("staging_bytes", HOSTS)
def test_a_batch_with_one_bad_row_is_refused_before_anything_is_copied(staging_bytes: int) -> None:
    world, device = World(FakeDevice(STAGING)), CpuDevice(staging_bytes)
    copier = Copier(world.arena, device)
    world.fill(1)
    groups, ids, offsets = batch([(1, 0), (0, BLOCKS)])
    for launch in (copier.save, copier.load):
        with pytest.raises(ValueError, match="block ids"):
            launch(world.pages, groups, ids, offsets, after=copier.mark())
    assert not world.arena.any()
    assert copier.has_room(0)
    copier.close()
