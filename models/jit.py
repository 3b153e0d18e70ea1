"""Functions that numba compiles to machine code: one loop where numpy would take dozens of calls for a single request.

A request that comes alone meets cold caches: it costs by the code that it runs through, more than by the numbers it computes.
Compiled once a machine and kept beside the source (else where `NUMBA_CACHE_DIR` says, else in the user's cache); the signature is
given, so nothing is ever compiled while a request waits. Never: threads, reordered sums; a result depends on its inputs alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

_F = TypeVar("_F", bound=Callable[..., None])


def reads(kind: type[np.generic], dimensions: int = 1) -> Any:
    """The type of an argument that is only read: a C-contiguous array, read-only or not."""
    return numba.types.Array(numba.from_dtype(np.dtype(kind)), dimensions, "C", readonly=True)


def writes(kind: type[np.generic], dimensions: int = 1) -> Any:
    """The type of an argument that takes results: a C-contiguous array."""
    return numba.types.Array(numba.from_dtype(np.dtype(kind)), dimensions, "C")


def number(kind: type[np.generic]) -> Any:
    """The type of an argument that is one number."""
    return numba.from_dtype(np.dtype(kind))


def compiled(*arguments: Any) -> Callable[[_F], _F]:
    """Compile a function that writes into its arguments and returns nothing."""

    def decorate(function: _F) -> _F:
        signature = numba.types.void(*arguments)
        try:
            made = numba.njit(signature, cache=True, error_model="numpy")(function)
        except RuntimeError as error:  # no place to keep what was compiled: then it is compiled at every start
            if "cannot cache" not in str(error):
                raise
            made = numba.njit(signature, error_model="numpy")(function)
        return cast(_F, made)

    return decorate
