"""A process that holds GPU memory, by libcuda alone: it starts in a tenth of the time that a framework takes.

Usage: cuda_holder.py MIB [SECONDS]

Takes a context and MIB of memory on every visible device, prints one JSON line (the devices' UUIDs as CUDA gives
them), and computes a little until standard input ends, the time is over, or SIGTERM comes.
"""

import ctypes
import json
import select
import signal
import sys
import time
import uuid

_BLOCK = 1 << 30


def check(code: int, what: str) -> None:
    if code != 0:
        raise SystemExit(f"{what}: CUDA error {code}")


def hold(cuda: ctypes.CDLL, device: int, size: int) -> tuple[str, list[tuple[int, int]]]:
    """A context on the device and `size` bytes in blocks; returns the device's UUID and the blocks."""
    context, name = ctypes.c_void_p(), (ctypes.c_ubyte * 16)()
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "context")
    check(cuda.cuCtxSetCurrent(context), "current context")
    check(cuda.cuDeviceGetUuid_v2(name, device), "UUID")
    blocks = []
    while size > 0:
        pointer, part = ctypes.c_uint64(), min(size, _BLOCK)
        check(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(part)), "memory")
        check(cuda.cuMemsetD8_v2(pointer, ctypes.c_ubyte(1), ctypes.c_size_t(part)), "memset")
        blocks.append((pointer.value, part))
        size -= part
    check(cuda.cuCtxSynchronize(), "synchronize")
    return f"GPU-{uuid.UUID(bytes=bytes(name))}", blocks


def main() -> None:
    size, seconds = int(sys.argv[1]) << 20, float(sys.argv[2]) if len(sys.argv) > 2 else 600.0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    check(cuda.cuInit(0), "init")
    check(cuda.cuDeviceGetCount(ctypes.byref(count)), "count")
    held = [hold(cuda, device, size) for device in range(count.value)]
    print(json.dumps([name for name, _ in held]), flush=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ready, _, _ = select.select([sys.stdin], [], [], 0.2)
        if ready and not sys.stdin.read(1):
            break
        for pointer, part in held[-1][1][:1]:
            cuda.cuMemsetD8_v2(ctypes.c_uint64(pointer), ctypes.c_ubyte(2), ctypes.c_size_t(part))


if __name__ == "__main__":
    main()
