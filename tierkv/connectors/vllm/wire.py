"""What scheduler side and worker side tell each other, on the engine's own channels.

Everything inside is ints, strings and bytes in tuples: whatever serializer the engine uses, it
carries no object of ours but these three classes. Workers run in other processes, maybe of
another start of the same code, never of another version.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from tierkv.blocks import Event, Move, pack_event, unpack_event
from tierkv.ledger import Agree, Appraised, Command, Rotate, Submit
from tierkv.storage import StoragePort

Packed = tuple[Any, ...]


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step's orders, the same for every rank.

    commands: `pack_command`, to be carried out before the moves.
    loads: (request id, `Move.pack()`): fill these pages, then say that the request has them.
    refused: ids of requests that wait for a load that cannot be: report it as failed.
    saves: `Move.pack()`: copy these pages once the step's forward is done.
    """

    commands: list[Packed] = field(default_factory=list)
    loads: list[tuple[str, Packed]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    saves: list[Packed] = field(default_factory=list)


@dataclass
class WorkerEvents(KVConnectorWorkerMetadata):
    """What happened on each rank since its last report: rank → `pack_event`, in order."""

    by_rank: dict[int, list[Packed]]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerEvents:
        """Both reports; called by the engine with one report of each rank."""
        if not isinstance(other, WorkerEvents):
            raise TypeError(f"cannot aggregate with {type(other).__name__}")
        merged = {rank: list(events) for rank, events in self.by_rank.items()}
        for rank, events in other.by_rank.items():
            merged.setdefault(rank, []).extend(events)
        return WorkerEvents(merged)

    def events(self) -> Iterable[tuple[int, Event]]:
        """(rank, event), each rank's in order."""
        for rank, packed in self.by_rank.items():
            for event in packed:
                yield rank, unpack_event(event)


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """What one rank has: its sizes, and the events of its tier's opening.

    rank: position in the engine's model-parallel group.
    arena_bytes: its arena. block_bytes: real bytes per block and group.
    state_ratios: `layout.worker_state_ratios`, one a group.
    events: `pack_event`; the recovered keys are in it as one packed blob.
    """

    rank: int
    arena_bytes: int
    block_bytes: tuple[int, ...]
    state_ratios: tuple[int | None, ...]
    events: list[Packed]


def pack_events(events: Sequence[Event]) -> list[Packed]:
    """`pack_event` of each."""
    return [pack_event(e) for e in events]


def pack_command(command: Command) -> Packed:
    """A tuple of ints and bytes; `carry_out` reads it."""
    match command:
        case Agree(rank, retire_id):
            return ("agree", rank, retire_id)
        case Appraised(rank, question_id, worth):
            return ("appraised", rank, question_id, worth.tobytes())
        case Rotate(epoch):
            return ("rotate", epoch)
        case Submit(rank, move):
            return ("submit", rank, move.pack())


def carry_out(packed: Packed, rank: int, port: StoragePort) -> None:
    """Pass a command on to this rank's storage, if it is meant for this rank."""
    match packed:
        case ("agree", int(whom), int(retire_id)):
            if whom == rank:
                port.agree(retire_id)
        case ("appraised", int(whom), int(question_id), bytes(worth)):
            if whom == rank:
                port.appraised(question_id, np.frombuffer(worth, np.bool_))
        case ("rotate", int(epoch)):
            port.rotate(epoch)
        case ("submit", whom, tuple(move)):
            if whom is None or whom == rank:
                port.submit(Move.unpack(move))
        case _:
            raise ValueError(f"not a command: {str(packed)[:80]}")
