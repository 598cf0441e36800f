"""Memory-mapped files: pages that a file lost read as zeros, and `is_whole` turns False.

    Mapper.map(file) ─▶ Mapping ─▶ .bytes ─▶ arrays, memoryviews    unmapped with the last view

If a mapped file shrinks, the kernel sends SIGBUS, which the native library handles
(`guarded_mapping.cpp`). Without that library no file is mapped.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

_INT, _BYTES, _BOOL = ctypes.c_int, ctypes.c_int64, ctypes.c_bool
_MAP: Final = ctypes.CFUNCTYPE(
    _INT, _INT, _BYTES, _BOOL, ctypes.POINTER(ctypes.c_void_p), use_errno=True
)
_IS_WHOLE: Final = ctypes.CFUNCTYPE(_BOOL, _INT)
_UNMAP: Final = ctypes.CFUNCTYPE(None, _INT)


class Mapper:
    def __init__(self, library: str) -> None:
        native = ctypes.CDLL(library)
        self._map = _MAP(("triptych_map", native))
        self._is_whole = _IS_WHOLE(("triptych_is_whole", native))
        self._unmap = _UNMAP(("triptych_unmap", native))

    def map(self, file: int, num_bytes: int, *, is_written: bool) -> Mapping:
        """Map the first bytes of an open file, which may be closed afterwards.

        Raises:
            OSError: it cannot be mapped, or too many are mapped.
        """
        address = ctypes.c_void_p()
        number = self._map(file, num_bytes, is_written, ctypes.byref(address))
        if number < 0 or address.value is None:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        is_whole = functools.partial(self._is_whole, number)
        mapping = Mapping(is_whole, address.value, num_bytes, is_written=is_written)
        weakref.finalize(mapping, self._unmap, number).atexit = False
        return mapping


class Mapping:
    """Bytes of a file. They stay mapped while any view of `bytes` exists, in any thread."""

    def __init__(
        self, is_whole: Callable[[], bool], address: int, num_bytes: int, *, is_written: bool
    ) -> None:
        self._is_whole = is_whole
        self.num_bytes = num_bytes
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (address, not is_written),
            "shape": (num_bytes,),
            "typestr": "|u1",
        }

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """All bytes, uint8 `[num_bytes]`."""
        return np.asarray(self)

    @property
    def is_whole(self) -> bool:
        """Whether no page was lost; False is permanent: such a mapping is void."""
        return self._is_whole()


class MappingCache:
    """Mappings of other processes' files between two transfers: at most `capacity_bytes`.

    A mapping of a removed file is dropped at the next `take` or `keep`. Thread-safe.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._kept: dict[tuple[int, int], tuple[int, Mapping]] = {}
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return sum(mapping.num_bytes for _, mapping in self._kept.values())

    def take(self, file: int, num_bytes: int) -> Mapping | None:
        """Remove and return the mapping of an open file, if it is cached and large enough."""
        with self._lock:
            self._drop_removed()
            mapping = self._drop(_identity(file))
        return None if mapping is None or mapping.num_bytes < num_bytes else mapping

    def keep(self, file: int, mapping: Mapping) -> None:
        """Cache a mapping for the next transfer of this file; owns the descriptor."""
        with self._lock:
            self._drop(_identity(file))
            self._kept[_identity(file)] = (file, mapping)
            self._drop_removed()
            while self.num_bytes > self._capacity_bytes:
                self._drop(next(iter(self._kept)))

    def close(self) -> None:
        """Drop all; cache none from now on."""
        with self._lock:
            self._capacity_bytes = 0
            for identity in list(self._kept):
                self._drop(identity)

    def _drop_removed(self) -> None:
        for identity, (file, _) in list(self._kept.items()):
            if os.fstat(file).st_nlink == 0:
                self._drop(identity)

    def _drop(self, identity: tuple[int, int]) -> Mapping | None:
        if identity not in self._kept:
            return None
        file, mapping = self._kept.pop(identity)
        os.close(file)
        return mapping


def _identity(file: int) -> tuple[int, int]:
    """Device and inode: unique while the file is open."""
    status = os.fstat(file)
    return status.st_dev, status.st_ino


def mapper_of(library: str | None) -> Mapper | None:
    """A mapper; None if there is no native library, which is logged."""
    if library is None:
        logger.info("no native library: shared memory is read and written, not mapped")
        return None
    return Mapper(library)
