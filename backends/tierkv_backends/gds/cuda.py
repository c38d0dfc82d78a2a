"""The little of the CUDA driver that a probe needs, without torch or cupy. All of it blocks."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tierkv.backend import DeviceMemory

_NON_BLOCKING: Final = 1
"""CU_STREAM_NON_BLOCKING: the stream does not wait for the default stream, nor that for it."""


def why_no_cuda_sync() -> str:
    """Why this process has no CUDA device, in words; empty where it has one."""
    try:
        cuda = _driver()
    except OSError:
        return "libcuda.so.1 was not found: no NVIDIA driver"
    if status := cuda.cuInit(0):
        return f"the CUDA driver does not start: cuInit = {status}"
    count = ctypes.c_int()
    if status := cuda.cuDeviceGetCount(ctypes.byref(count)):
        return f"the CUDA driver lists no GPU: cuDeviceGetCount = {status}"
    return "" if count.value else "the CUDA driver lists no GPU"


@contextmanager
def device_memory_sync(nbytes: int, ordinal: int = 0) -> Iterator[DeviceMemory]:
    """Some memory of a GPU and a stream of its own. `OSError` where the driver refuses."""
    cuda = _driver()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    pointer, stream = ctypes.c_uint64(), ctypes.c_void_p()
    _check(cuda.cuDeviceGet(ctypes.byref(device), ordinal), "cuDeviceGet")
    _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    try:
        _check(cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")
        _check(cuda.cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING), "cuStreamCreate")
        _check(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(nbytes)), "cuMemAlloc")
        yield DeviceMemory(base=pointer.value, base_nbytes=nbytes, stream=stream.value or 0)
    finally:
        if pointer.value:
            cuda.cuMemFree_v2(pointer)
        if stream.value:
            cuda.cuStreamDestroy_v2(stream)
        cuda.cuDevicePrimaryCtxRelease_v2(device)


def put_sync(memory: DeviceMemory, data: bytes) -> None:
    """Copy `data` to the device."""
    where = ctypes.c_uint64(memory.address)
    _check(_driver().cuMemcpyHtoD_v2(where, data, ctypes.c_size_t(len(data))), "cuMemcpyHtoD")


def get_sync(memory: DeviceMemory) -> bytes:
    """Copy what lies on the device."""
    out = ctypes.create_string_buffer(memory.nbytes)
    where = ctypes.c_uint64(memory.address)
    _check(_driver().cuMemcpyDtoH_v2(out, where, ctypes.c_size_t(memory.nbytes)), "cuMemcpyDtoH")
    return out.raw


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, call: str) -> None:
    if status:
        raise OSError(f"{call} = {status}")
