"""Compiled functions: what they take, what they refuse, and that they compile where nothing can be kept."""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt
import pytest

from models import jit
from models.jit import compiled, number, reads, writes


def doubled(numbers: npt.NDArray[np.int32], by: int, out: npt.NDArray[np.int64]) -> None:
    for i in range(len(numbers)):
        out[i] = numbers[i] * by


DOUBLED = (reads(np.int32), number(np.int64), writes(np.int64))


def test_it_reads_what_may_not_be_written() -> None:
    numbers = np.frombuffer(np.arange(4, dtype=np.int32).tobytes(), np.int32)
    assert not numbers.flags.writeable
    out = np.empty(4, np.int64)
    compiled(*DOUBLED)(doubled)(numbers, 2, out)
    assert out.tolist() == [0, 2, 4, 6]


def test_another_type_or_layout_is_an_error_and_no_new_compilation() -> None:
    function, out = compiled(*DOUBLED)(doubled), np.empty(4, np.int64)
    with pytest.raises(TypeError, match="No matching definition"):
        function(np.arange(4, dtype=np.float64), 2, out)
    with pytest.raises(TypeError, match="No matching definition"):
        function(np.arange(8, dtype=np.int32)[::2], 2, out)


def test_without_a_place_for_the_cache_it_compiles_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, asked = numba.njit, []

    def njit(*arguments: object, **options: object) -> object:
        asked.append(options.get("cache", False))
        if options.get("cache"):
            raise RuntimeError("cannot cache function 'doubled': no locator available for file 'x.py'")
        return stock(*arguments, **options)

    monkeypatch.setattr(jit.numba, "njit", njit)
    out = np.empty(2, np.int64)
    compiled(*DOUBLED)(doubled)(np.array([1, 2], np.int32), 3, out)
    assert out.tolist() == [3, 6]
    assert asked == [True, False]


def test_any_other_failure_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def njit(*_: object, **__: object) -> object:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(jit.numba, "njit", njit)
    with pytest.raises(RuntimeError, match="out of memory"):
        compiled(*DOUBLED)(doubled)
