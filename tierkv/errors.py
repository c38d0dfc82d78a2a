"""The error tree. A miss is an answer, not an error; these are for what a caller must mend.

::

    TierKVError
    ├── ConfigError            bad option, URL or layout: what, where, what to write instead
    │   ├── LayoutError        a layout that cannot be (window 0, block 0, no group)
    │   ├── BackendNotFoundError   no backend for a URL scheme (names the extra, the nearest scheme)
    │   └── CapacityError      a capacity too small to work with, or more than there is
    ├── StoreError             a storage tier cannot do what was asked
    │   ├── StoreBusyError     the directory is owned by another process (says which)
    │   ├── StoreUnusableError unwritable, full at open, unknown format where one is required
    │   └── KeeperError        the keeper process could not start or ended during open
    ├── DeadlineError          an operation with a deadline did not end in time
    └── CacheClosedError       the cache is closed
"""

from __future__ import annotations


class TierKVError(Exception):
    """Base of every error that tierkv raises on purpose."""


class ConfigError(TierKVError, ValueError):
    """Bad input at the edge: one line that says what, where, and what to write instead."""


class LayoutError(ConfigError):
    """A layout that cannot be: no group, block or window of 0, unit that does not divide."""


class BackendNotFoundError(ConfigError):
    """No backend is registered for a URL scheme, or its optional dependency is missing."""


class CapacityError(ConfigError):
    """A capacity that is too small to work with, or larger than what the machine has."""


class StoreError(TierKVError):
    """A storage tier cannot do what was asked."""


class StoreBusyError(StoreError):
    """The store's directory is locked by another process; the message says by which."""


class StoreUnusableError(StoreError):
    """The store's directory is unwritable, full, or not what it should be."""


class KeeperError(StoreError):
    """The keeper process could not be started, or ended before it had opened its tier."""


class DeadlineError(TierKVError, TimeoutError):
    """An operation did not end before its deadline; what it had started goes on or is undone."""


class CacheClosedError(TierKVError):
    """An operation was asked of a cache that is closed or closing."""
