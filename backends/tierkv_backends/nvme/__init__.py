"""The ``nvme`` backend: log-structured segments on a local disk. Start reading in `format`."""

from tierkv_backends.nvme.backend import NvmeBackend

__all__ = ["NvmeBackend"]
