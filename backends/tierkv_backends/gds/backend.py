"""`GdsBackend`: an nvme store whose payload kvikio moves."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from tierkv.backend import (
    BlockBatch,
    DeviceBatch,
    DeviceMemory,
    DevicePath,
    Outcomes,
    Usage,
    finish,
)
from tierkv.errors import ConfigError, StoreError, StoreUnusableError
from tierkv.urls import TierURL, nearest
from tierkv_backends.gds import probe
from tierkv_backends.gds.modes import Mode, Verdict
from tierkv_backends.nvme.backend import NvmeBackend
from tierkv_backends.nvme.engine import Engine
from tierkv_backends.nvme.files import THREADS
from tierkv_backends.nvme.options import Direct, Options
from tierkv_backends.nvme.store import unusable

if TYPE_CHECKING:
    from tierkv_backends.gds.engine import KvikioEngine  # loads kvikio

log = logging.getLogger(__name__)

WISHES: Final = ("auto", "gds")

PATHS: Final = {
    Mode.GDS: DevicePath.DIRECT,
    Mode.CUFILE_COMPAT: DevicePath.BOUNCE,
    Mode.COMPAT: DevicePath.BOUNCE,
    Mode.HOST: DevicePath.NONE,
}


def kvikio_engine_sync(options: Options, verdict: Verdict) -> KvikioEngine:
    """The engine for a mode that is not ``host``. Loads kvikio, so not on the loop."""
    from tierkv_backends.gds.engine import KvikioEngine, Settings

    settings = Settings(
        threads=options.threads,
        direct=options.direct is not Direct.OFF,
        compat=verdict.mode is Mode.COMPAT,
    )
    return KvikioEngine(settings, verdict.mode)


def host_engine_sync(options: Options) -> Engine:
    """kvikio for host memory, as ``nvme:///DIR?engine=kvikio`` asks for it.

    `ConfigError` where it is not installed, `StoreUnusableError` where it moves nothing.
    """
    verdict = _find_mode_sync(options.root)
    if verdict.missing:
        raise ConfigError(f"nvme store {options.root}: engine=kvikio: {verdict.reason}")
    if verdict.mode is Mode.HOST:
        raise StoreUnusableError(
            f"nvme store {options.root}: engine=kvikio does not work here: {verdict.reason}; "
            "write engine=threads"
        )
    return kvikio_engine_sync(options, verdict)


def _find_mode_sync(root: Path) -> Verdict:
    with unusable(root):
        root.mkdir(parents=True, exist_ok=True)
        return probe.find_mode_sync(root)


class GdsBackend(NvmeBackend):
    """``gds:///DIR?capacity=500GiB``: the nvme format, between disk and GPU memory by kvikio.

    Options: those of ``nvme`` but `engine`, and `mode`: ``auto`` takes the best way that is proven
    at open, ``gds`` refuses whatever is not GPUDirect Storage. `usage().modes` says which way it
    is (``mode``) and why (``reason``): ``gds``, ``cufile-compat`` (cuFile copies through host
    memory), ``compat`` (kvikio does) or ``host`` (no CUDA: as ``nvme``). A directory is opened by
    ``nvme`` and ``gds`` alike, by one at a time. Blocks are padded to 4096 bytes on media.

    Device memory is that of the process that opens this: open it where the GPU's pages are staged.
    """

    scheme = "gds"

    def __init__(self, options: Options, *, wish: str = "auto") -> None:
        super().__init__(options)
        self._wish = wish
        self._verdict = Verdict(mode=Mode.HOST, reason="not open")
        self._device: KvikioEngine | None = None

    @classmethod
    def from_url(cls, url: TierURL) -> GdsBackend:
        """`ConfigError` for an unknown or bad option."""
        wish = dict(url.options).get("mode", "auto")
        if wish not in WISHES:
            raise ConfigError(
                f"tier URL {url.text!r}: mode={wish}{nearest(wish, WISHES)}; write one of "
                f"{', '.join(WISHES)}"
            )
        rest = tuple((key, value) for key, value in url.options if key != "mode")
        return cls(Options.parse(replace(url, options=rest), engine_is_an_option=False), wish=wish)

    def _engine_sync(self) -> Engine:
        verdict = self._verdict = _find_mode_sync(self._options.root)
        if verdict.missing:
            raise ConfigError(f"gds store {self._options.root}: {verdict.reason}")
        if self._wish == "gds" and verdict.mode is not Mode.GDS:
            raise StoreUnusableError(
                f"gds store {self._options.root}: mode=gds, but only {verdict.mode} works here: "
                f"{verdict.reason}; write mode=auto to take that"
            )
        log.info("gds store %s: mode %s: %s", self._options.root, verdict.mode, verdict.reason)
        self._device = None
        if verdict.mode is Mode.HOST:
            return THREADS
        self._device = kvikio_engine_sync(self._options, verdict)
        return self._device

    @property
    def device_path(self) -> DevicePath:
        """How device memory reaches the disk; ``none`` before `open`."""
        return PATHS[self._verdict.mode]

    async def write_device(self, batch: DeviceBatch) -> Outcomes:
        """As `write`, from device memory. `StoreError` in mode ``host``."""
        self._need_device()
        # The same columns. What lies between looks at no byte of the memory, only the engine does.
        return await self.write(cast(BlockBatch, batch))

    async def read_device(self, batch: DeviceBatch) -> Outcomes:
        """As `read`, into device memory. `StoreError` in mode ``host``."""
        self._need_device()
        return await self.read(cast(BlockBatch, batch))

    async def register_device(self, memory: DeviceMemory) -> None:
        """Map an allocation for direct transfers. `StoreError` where it is refused."""
        engine = self._need_device()
        await finish(self._run(engine.register_sync, memory))

    async def unregister_device(self, memory: DeviceMemory) -> None:
        """Undo `register_device`."""
        engine = self._need_device()
        await finish(self._run(engine.unregister_sync, memory))

    def _need_device(self) -> KvikioEngine:
        if self._device is None:
            raise StoreError(
                f"gds store {self._options.root}: no device memory in mode {self._verdict.mode}: "
                f"{self._verdict.reason}"
            )
        return self._device

    async def probe(self) -> dict[str, str]:
        """`mode` and `reason` as an `open` would find them. For a backend that is not open."""
        verdict = await asyncio.to_thread(probe.find_mode_sync, self._options.root)
        return {"mode": str(verdict.mode), "reason": verdict.reason}

    async def usage(self) -> Usage:
        """As nvme's, with the mode and its reason."""
        usage = await super().usage()
        told = {"mode": str(self._verdict.mode), "reason": self._verdict.reason}
        return replace(usage, modes=usage.modes | told)
