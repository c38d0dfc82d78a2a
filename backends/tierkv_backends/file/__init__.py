"""``file:///mnt/shared/kv?capacity=500GiB``: one file per block.

For shared file systems, and for reading what is there with ordinary tools. On a local NVMe drive
`tierkv_backends.nvme` is several times faster: a file per block costs an inode and some system
calls each.
"""

from tierkv_backends.file.backend import FileBackend as FileBackend

__all__ = ["FileBackend"]
