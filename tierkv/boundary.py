"""Boundary policies by name: which multiples of the alignment are worth their tails.

`tierkv.reach.boundaries` says what each of them means for a prompt.
"""

from __future__ import annotations

import difflib
import enum
from dataclasses import dataclass
from typing import Final

from tierkv.errors import ConfigError

LADDER_TOKENS: Final = 4096
"""Tokens between the rungs of `auto`: on a public trace of conversations it costs a quarter of what
`dense` does and loses 1.3 % of its hit tokens (bench/trace_replay.py)."""

_WRITE = "write auto, dense, end, engine or interval:TOKENS"


class PolicyKind(enum.StrEnum):
    """How a boundary policy chooses."""

    AUTO = "auto"
    DENSE = "dense"
    END = "end"
    ENGINE = "engine"
    INTERVAL = "interval"


@dataclass(frozen=True, slots=True)
class Policy:
    """Which boundaries of a prompt are kept; make one with `Policy.parse`.

    auto: the end and the junctions, as `end` does, and a ladder like that of `interval`, so that
    no hit loses more than `tierkv.reach.lost_tokens_at_most`.
    dense: every multiple of the alignment.
    end: the last boundary that a longer prompt can reach, the last one that the same prompt can
    reach, and the junctions.
    interval: for every multiple of `interval_tokens`, the last multiple of the alignment at or
    below it, and the junctions.
    engine: what the engine keeps in its own pool; `resolve` says which of the others that is, and
    nothing else can be done with it.
    """

    kind: PolicyKind
    interval_tokens: int = 0

    def __str__(self) -> str:
        if not self.interval_tokens or self == AUTO:
            return str(self.kind)
        return f"{self.kind}:{self.interval_tokens}"

    @classmethod
    def parse(cls, text: str | Policy) -> Policy:
        """A policy from ``auto``, ``dense``, ``end``, ``engine``, ``interval:N`` or ``auto:N``.

        N: tokens between two rungs. Raises `ConfigError` in one line for another text.
        """
        if isinstance(text, Policy):
            return text
        name, colon, argument = text.partition(":")
        if name in (PolicyKind.INTERVAL, PolicyKind.AUTO) and (colon or name != PolicyKind.AUTO):
            tokens = int(argument) if argument.isascii() and argument.isdigit() else 0
            if tokens < 1:
                raise ConfigError(
                    f"policy {text!r}: write the tokens between two kept boundaries, "
                    f"like {name}:4096"
                )
            return cls(PolicyKind(name), tokens)
        if not colon and name in list(PolicyKind):
            return AUTO if name == PolicyKind.AUTO else cls(PolicyKind(name))
        near = difflib.get_close_matches(name, [str(k) for k in PolicyKind], n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(f"unknown policy {text!r}{hint}; {_WRITE}")

    def resolve(self, retention_interval_tokens: int | None) -> Policy:
        """The policy itself; for ``engine`` the one that keeps what the engine's setting keeps.

        retention_interval_tokens: vLLM's `prefix_cache_retention_interval`. None: every boundary,
            so `dense`; 0: the end and the junctions, so `end`; N: a ladder too, so ``auto:N``.
        """
        if self.kind is not PolicyKind.ENGINE:
            return self
        if retention_interval_tokens is None:
            return DENSE
        if retention_interval_tokens == 0:
            return Policy(PolicyKind.END)
        return Policy(PolicyKind.AUTO, retention_interval_tokens)


AUTO: Final = Policy(PolicyKind.AUTO, LADDER_TOKENS)
DENSE: Final = Policy(PolicyKind.DENSE)
