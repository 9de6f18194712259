"""SM partitions on the GPU: streams restricted to some of its SMs (CUDA green contexts).

torch's `GreenContext` cuts every partition from the whole GPU, so two of them may get the same SMs. Here the GPU is
split once, into the smallest possible groups, and partitions are made of whole groups, so they are disjoint. The calls
are those of the CUDA driver API (cuda.h of CUDA 13.0, section "Green Contexts"; available since CUDA 12.5), and the
streams are torch's `ExternalStream`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from gpusim.errors import GpuError
from gpusim.gpu.device import require_gpu
from gpusim.gpu.driver import LIBRARY, Driver

_RESOURCE_SM: Final = 1  # CU_DEV_RESOURCE_TYPE_SM
_DEFAULT_STREAM: Final = 1  # CU_GREEN_CTX_DEFAULT_STREAM, required
_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING, required
#: Sizes in `CUdevResource`: the type, padding, and a union of 48 bytes that begins with three numbers of the SMs.
_PADDING_BYTES, _REST_BYTES = 92, 36


class _Resource(ctypes.Structure):
    """`CUdevResource` of cuda.h, 144 bytes."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("padding", ctypes.c_ubyte * _PADDING_BYTES),
        ("sms", ctypes.c_uint),
        ("smallest", ctypes.c_uint),
        ("alignment", ctypes.c_uint),
        ("rest", ctypes.c_ubyte * _REST_BYTES),
    )


@dataclass(frozen=True)
class SmGroups:
    """Split of the GPU's SMs: `count` groups of `group_sms` SMs, and `left_sms` left over."""

    sms: int
    group_sms: int
    count: int
    left_sms: int


class Partitions:
    """Disjoint partitions of the current GPU and their streams; both last as long as this object.

    `sms[i]` is the size of partition i. Raises `GpuError` without a GPU, where the driver has no green contexts, and
    where the sizes do not fit.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._driver = _Driver()
        groups, left = self._driver.split()
        self.groups = _groups_of(self._driver.device_sms, groups, left)
        dealt = deal_groups(sizes, self.groups)
        self._contexts: list[ctypes.c_void_p] = []
        self._streams: list[ctypes.c_void_p] = []
        self.sms: list[int] = []
        for first, last, with_left in dealt:
            members = [*groups[first:last], *([left] if with_left else [])]
            self._contexts.append(self._driver.context(members))
            self.sms.append(sum(member.sms for member in members))

    def stream(self, partition: int) -> torch.cuda.Stream:
        """Return a new stream whose kernels run only on the SMs of a partition, in a CUDA graph, too."""
        pointer = self._driver.stream(self._contexts[partition])
        self._streams.append(pointer)
        stream: torch.cuda.Stream = torch.cuda.ExternalStream(pointer.value, device=self._driver.device)
        return stream

    def close(self) -> None:
        """Destroy the partitions; their streams, and graphs recorded on them, must not be used afterwards."""
        torch.cuda.synchronize()
        while self._streams:
            self._driver.call("cuStreamDestroy_v2", self._streams.pop())
        while self._contexts:
            self._driver.call("cuGreenCtxDestroy", self._contexts.pop())


def sm_groups() -> SmGroups:
    """Return the SM split of the current GPU. Raises as `Partitions` does."""
    driver = _Driver()
    groups, left = driver.split()
    return _groups_of(driver.device_sms, groups, left)


def deal_groups(sizes: Sequence[int], groups: SmGroups) -> list[tuple[int, int, bool]]:
    """Return, for each partition, its first group, the one after its last, and whether the left-over SMs belong to it.

    Only the last partition can have those, where whole groups do not make its size. Raises `GpuError` for an impossible
    size, and for too many groups.
    """
    dealt: list[tuple[int, int, bool]] = []
    first = 0
    for number, size in enumerate(sizes):

        def fits(whole: int, begin: int = first) -> bool:
            return whole >= 0 and not whole % groups.group_sms and begin + whole // groups.group_sms <= groups.count

        with_left = bool(groups.left_sms) and number == len(sizes) - 1 and not fits(size)
        whole = size - (groups.left_sms if with_left else 0)
        if size < 1 or not fits(whole):
            raise GpuError(
                f"partition {number} of {size} SMs: this GPU has {groups.count} groups of {groups.group_sms} SMs"
                f"{f' and {groups.left_sms} left over' if groups.left_sms else ''}, {first} of the groups in use"
            )
        dealt.append((first, first + whole // groups.group_sms, with_left))
        first += whole // groups.group_sms
    return dealt


def _groups_of(device_sms: int, groups: Sequence[_Resource], left: _Resource) -> SmGroups:
    return SmGroups(device_sms, groups[0].sms, len(groups), left.sms)


class _Driver:
    """The CUDA driver calls for partitions."""

    def __init__(self) -> None:
        self.device = require_gpu()
        torch.cuda.init()
        torch.cuda.current_stream().synchronize()  # initializes the primary context
        self._driver = Driver()
        if not self._driver.has("cuGreenCtxStreamCreate"):
            raise GpuError(f"no SM partitions: {LIBRARY} has no green contexts (CUDA 12.5 or later)")
        self._number = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(self._number), ctypes.c_int(self.device.index))
        self._all = _Resource()
        self.call("cuDeviceGetDevResource", self._number, ctypes.byref(self._all), ctypes.c_int(_RESOURCE_SM))
        self.device_sms = int(self._all.sms)

    def call(self, name: str, *arguments: object) -> None:
        """Call the driver. Raises `GpuError` with the driver's error name."""
        try:
            self._driver.call(name, *arguments)
        except GpuError as cause:
            raise GpuError(f"no SM partitions: {cause} (torch {torch.__version__})") from cause

    def split(self) -> tuple[list[_Resource], _Resource]:
        """Return the GPU's SMs in the smallest possible groups, and the left-over SMs."""
        smallest = ctypes.c_uint(max(1, self._all.smallest))
        count = ctypes.c_uint()
        none = ctypes.c_void_p()
        whole = ctypes.byref(self._all)
        self.call("cuDevSmResourceSplitByCount", none, ctypes.byref(count), whole, none, ctypes.c_uint(0), smallest)
        groups, left = (_Resource * count.value)(), _Resource()
        self.call(
            "cuDevSmResourceSplitByCount",
            groups,
            ctypes.byref(count),
            whole,
            ctypes.byref(left),
            ctypes.c_uint(0),
            smallest,
        )
        if not count.value:
            raise GpuError("no SM partitions: this GPU cannot split its SMs")
        return list(groups[: count.value]), left

    def context(self, members: Sequence[_Resource]) -> ctypes.c_void_p:
        """Make a green context of groups from one split."""
        resources = (_Resource * len(members))(*members)
        described, context = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuDevResourceGenerateDesc", ctypes.byref(described), resources, ctypes.c_uint(len(members)))
        self.call("cuGreenCtxCreate", ctypes.byref(context), described, self._number, ctypes.c_uint(_DEFAULT_STREAM))
        return context

    def stream(self, context: ctypes.c_void_p) -> ctypes.c_void_p:
        """Make a stream of a green context."""
        pointer = ctypes.c_void_p()
        flags = ctypes.c_uint(_NON_BLOCKING)
        self.call("cuGreenCtxStreamCreate", ctypes.byref(pointer), context, flags, ctypes.c_int(0))
        return pointer
