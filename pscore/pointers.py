"""Arrays over memory that is given by its address, for compiled loops over many tensors at once.

Importing this module imports numba: import it from modules of loops only, which are imported when they are needed.
"""

# mypy: ignore-errors

import ctypes

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic, overload


@intrinsic
def _pointer(_, address):
    def generate(_context, builder, _signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


def float32_at(address, size):
    """Return ``size`` fp32 numbers at an address, as an array that owns nothing."""
    return np.frombuffer((ctypes.c_float * size).from_address(address), np.float32)


def uint32_at(address, size):
    """Return ``size`` words of 32 bits at an address."""
    return np.frombuffer((ctypes.c_uint32 * size).from_address(address), np.uint32)


def uint16_at(address, size):
    """Return ``size`` words of 16 bits at an address."""
    return np.frombuffer((ctypes.c_uint16 * size).from_address(address), np.uint16)


@overload(float32_at)
def _float32_at(address, size):
    return lambda address, size: carray(_pointer(address), size, np.float32)


@overload(uint32_at)
def _uint32_at(address, size):
    return lambda address, size: carray(_pointer(address), size, np.uint32)


@overload(uint16_at)
def _uint16_at(address, size):
    return lambda address, size: carray(_pointer(address), size, np.uint16)
