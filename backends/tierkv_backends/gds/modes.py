"""The ways between file and GPU, and the judgement which of them is really in force. Pure."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Mode(enum.StrEnum):
    """From the best to the least."""

    GDS = "gds"
    CUFILE_COMPAT = "cufile-compat"
    COMPAT = "compat"
    HOST = "host"


class Try(enum.StrEnum):
    """What one probe demands.

    STRICT: cuFile, with its own compatibility mode disallowed. LOOSE: cuFile, as it likes.
    BOUNCE: kvikio without cuFile.
    """

    STRICT = "strict"
    LOOSE = "loose"
    BOUNCE = "bounce"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What one probe found.

    no_cuda: why there is no CUDA device. no_kvikio: why kvikio cannot be used. missing: it is not
    installed. compat: kvikio leaves cuFile be, and was tried so. gds_available: the driver's word.
    allow_compat: whether cuFile would fall back by itself. error: why the transfer failed.
    """

    tried: Try
    no_cuda: str = ""
    no_kvikio: str = ""
    missing: bool = False
    compat: bool = False
    gds_available: bool = False
    allow_compat: bool = True
    error: str = ""

    def why_not_gds(self) -> str:
        """Empty where this probe proves GPUDirect Storage."""
        if self.error:
            return f"cuFile without its compatibility mode failed: {self.error}"
        if not self.gds_available:
            return "the cuFile driver says that GPUDirect Storage is not available"
        if self.allow_compat:
            return "cuFile's own compatibility mode cannot be disallowed, so nothing is proven"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The mode in force, and why it is not a better one (or that it was proven)."""

    mode: Mode
    reason: str
    missing: bool = False


def next_try(attempts: Sequence[Attempt]) -> Try | None:
    """What to probe after `attempts`; None where they decide."""
    if not attempts:
        return Try.STRICT
    last = attempts[-1]
    if last.no_cuda or last.no_kvikio or last.compat:
        return None
    if last.tried is Try.STRICT:
        return Try.LOOSE if last.why_not_gds() else None
    return Try.BOUNCE if last.tried is Try.LOOSE and last.error else None


def judge(attempts: Sequence[Attempt]) -> Verdict:
    """The best mode that was proven."""
    first, last = attempts[0], attempts[-1]
    if last.no_cuda or last.no_kvikio:
        reason = last.no_cuda or last.no_kvikio
        return Verdict(mode=Mode.HOST, reason=reason, missing=last.missing)
    why_not = (
        "kvikio finds no cuFile that works here (library, /run/udev or its configuration)"
        if first.compat
        else first.why_not_gds()
    )
    if last.error:
        return Verdict(mode=Mode.HOST, reason=f"kvikio moves nothing here: {last.error}")
    if last.compat:
        return Verdict(mode=Mode.COMPAT, reason=why_not)
    if last.tried is Try.STRICT:
        return Verdict(mode=Mode.GDS, reason="written and read back past host memory")
    return Verdict(mode=Mode.CUFILE_COMPAT, reason=why_not)
