"""The ``gds`` backend: the nvme format, moved by kvikio straight to and from GPU memory."""

from tierkv_backends.gds.backend import GdsBackend

__all__ = ["GdsBackend"]
