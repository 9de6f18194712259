"""Small gzip files that are huge when decompressed."""

from __future__ import annotations

import struct
import zlib

HEADER = b"\x1f\x8b\x08\0\0\0\0\0\x02\xff"


def repeated_gzip(head: bytes, chunk: bytes, times: int, tail: bytes = b"") -> bytes:
    """Return gzip of `head`, of `times` times `chunk`, and of `tail`.

    The chunk is compressed once: after a full flush nothing refers to bytes before it, so its copies may follow.
    """
    packer = zlib.compressobj(level=9, wbits=-zlib.MAX_WBITS)
    first, middle = (packer.compress(part) + packer.flush(zlib.Z_FULL_FLUSH) for part in (head, chunk))
    last = packer.compress(tail) + packer.flush()
    crc = zlib.crc32(head)
    for _ in range(times):
        crc = zlib.crc32(chunk, crc)
    size = len(head) + times * len(chunk) + len(tail)
    return b"".join((HEADER, first, middle * times, last, struct.pack("<2I", zlib.crc32(tail, crc), size & 0xFFFFFFFF)))
