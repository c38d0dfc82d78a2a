"""Finds a backend's class by URL scheme, through the entry points of ``tierkv.backends``."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from tierkv.backend import Backend
from tierkv.errors import BackendNotFoundError
from tierkv.urls import TierURL, nearest

GROUP = "tierkv.backends"


def schemes() -> dict[str, EntryPoint]:
    """Every registered scheme. Costs about a millisecond: asked at open, not at import."""
    return {e.name: e for e in entry_points(group=GROUP)}


def backend_class(scheme: str) -> type[Backend]:
    """The class registered for `scheme`. `BackendNotFoundError` names the nearest, or the extra."""
    known = schemes()
    if scheme not in known:
        raise BackendNotFoundError(
            f"no backend is registered for scheme {scheme!r}{nearest(scheme, known)}; "
            f"installed: {', '.join(sorted(known)) or 'none'}"
        )
    entry = known[scheme]
    try:
        loaded = entry.load()
    except (ImportError, AttributeError) as exc:  # no such module, or no such class in it
        extra = f"; install tierkv[{entry.extras[0]}]" if entry.extras else ""
        raise BackendNotFoundError(
            f"backend {scheme!r} ({entry.value}) cannot be imported: {exc}{extra}"
        ) from exc
    if not (isinstance(loaded, type) and issubclass(loaded, Backend)):
        raise BackendNotFoundError(
            f"backend {scheme!r} ({entry.value}) is not a tierkv.backend.Backend"
        )
    return loaded


def make_backend(url: str | TierURL) -> Backend:
    """A backend for a tier URL, options parsed, not yet open."""
    parsed = TierURL.parse(url) if isinstance(url, str) else url
    return backend_class(parsed.scheme).from_url(parsed)
