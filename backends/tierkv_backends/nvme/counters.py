"""Monotonic counts of the ``nvme`` backend."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What happened since open.

    bytes_asked: payload that writes brought. bytes_saved: what of it is in place. bytes_written:
    what went to media for it, headers, padding, footers and what was written again included.
    bytes_read: payload that reads brought back.
    blocks_declined: saves without room. blocks_evicted: given up to make room. blocks_reinserted,
    bytes_reinserted: written again, their payload, instead of given up. blocks_lost: found cut
    short or deleted. segments_recycled, segments_deleted: given up, to be used again or not.
    segments_lost: files that were deleted under us.
    """

    bytes_asked: int = 0
    bytes_saved: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    blocks_declined: int = 0
    blocks_evicted: int = 0
    blocks_reinserted: int = 0
    bytes_reinserted: int = 0
    blocks_lost: int = 0
    segments_recycled: int = 0
    segments_deleted: int = 0
    segments_lost: int = 0
    write_errors: int = 0
    read_errors: int = 0
    refill_errors: int = 0
    unaligned_batches: int = 0

    @property
    def write_amplification(self) -> float:
        """Bytes written to media per byte of payload saved; 0 while nothing was."""
        return self.bytes_written / self.bytes_saved if self.bytes_saved else 0.0
