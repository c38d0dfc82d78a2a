"""What loss and recovery of a tier cost the thread that decides, and a rotation.

``python -m bench.ledger`` prints milliseconds of the thread's own time for ``--rows`` blocks that
the tier holds, of which ``--pinned`` lie in the arena. An engine's scheduler does nothing else
meanwhile. In the order in which they happen:

recovered_first: `Recovered` with all rows, into an empty ledger: an engine's start.
down: `TierDown` with nothing pinned.
recovered: `Recovered` with all rows after it.
down_pinned: `TierDown` with the pinned rows there.
rotate: `Ledger.rotate` with all of it there.

Goal: 300 ms each for a million rows.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np

from tierkv.blocks import HASH_BYTES, Copied, Event, Keys, MoveDone, Recovered, TierDown
from tierkv.layout import Group, GroupKind, Layout
from tierkv.ledger import Ledger

_LAYOUT = Layout((Group(name="full", kind=GroupKind.FULL, block_tokens=16, block_bytes=4096),))


def _ms(act: Callable[[], object]) -> float:
    start = time.thread_time()
    act()
    return (time.thread_time() - start) * 1e3


def measure(rows: int, pinned: int) -> dict[str, float]:
    """Milliseconds of each, in the order in which they happen here."""
    raw = np.random.default_rng(0).bytes(HASH_BYTES * rows)
    hashes = [raw[i : i + HASH_BYTES] for i in range(0, HASH_BYTES * pinned, HASH_BYTES)]
    keys = Keys(np.zeros(rows, np.uint16), raw)
    ledger = Ledger(_LAYOUT, arena_bytes=4096 * max(1, 2 * pinned))

    def apply(event: Event) -> float:
        return _ms(lambda: ledger.apply(0, event))

    times = {"recovered_first": apply(Recovered(keys, 0))}
    times["down"] = apply(TierDown("bench"))
    if pinned:
        move = ledger.begin_save(
            "save",
            hashes,
            computed_tokens=16 * pinned,
            known_tokens=16 * pinned,
            block_ids=[range(pinned)],
        )
        assert move is not None
        apply(Copied(move.id))
        apply(MoveDone(move.id, np.zeros(len(move), np.uint8)))
        ledger.release("save")
    times["recovered"] = apply(Recovered(keys, 0))
    times["down_pinned"] = apply(TierDown("bench"))
    apply(Recovered(keys, 0))
    times["rotate"] = _ms(ledger.rotate)
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="bench.ledger", description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--pinned", type=int, default=10_000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    times = measure(args.rows, min(args.pinned, args.rows))
    if args.json:
        print(json.dumps({"rows": args.rows, "pinned": args.pinned, "ms": times}))
        return
    print(f"{args.rows:,} rows, {args.pinned:,} pinned: milliseconds")
    for name, ms in times.items():
        print(f"{name:>16}{ms:10.1f}")


if __name__ == "__main__":
    main()
