"""Lines of a file, compressed or not, as bytes: what every text format begins with.

In: a path. Out: lines with their line ends, progress told on the way. A gzip stream that ends early and a line that is too
long are counted, not fatal; an encoding that can't be read line by line (UTF-16, UTF-32) is a `UsageError`.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from schemas.errors import UsageError
from solaris.importers.rows import Rows

LINE_BYTES_MAX = 16 << 20
_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
_WIDE = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")

Progress = Callable[[float], None]


def head(path: Path, size: int = 65_536) -> bytes:
    """The first bytes of a file, unpacked, without a byte order mark. Raises `UsageError`."""
    start = b""
    with path.open("rb") as raw:
        file = _unpacked(raw)
        try:
            while len(start) < size and (more := file.read(4096)):
                start += more
        except (EOFError, gzip.BadGzipFile, zlib.error):
            if not start:
                raise UsageError(f"{path} can't be read as gzip; fetch it again, or unpack it first") from None
    if not start.startswith(b"PAR1"):
        _refuse_wide(path, start)
    return start.removeprefix(_BOM)


def lines(path: Path, rows: Rows, progress: Progress = lambda _: None) -> Iterator[bytes]:
    """Each line with its end (the last one may lack it). Too long lines and a torn gzip are counted in `rows`."""
    size = max(path.stat().st_size, 1)
    with path.open("rb") as raw:
        file, number = _unpacked(raw), 0
        while True:
            try:
                line = file.readline(LINE_BYTES_MAX)
                if len(line) == LINE_BYTES_MAX and not line.endswith(b"\n"):
                    rows.drop("line_too_long")
                    while line and not line.endswith(b"\n"):
                        line = file.readline(LINE_BYTES_MAX)
                    continue
            except (EOFError, gzip.BadGzipFile, zlib.error):
                rows.drop("gzip_ends_early")
                return
            if not line:
                return
            if number == 0:
                _refuse_wide(path, line)
                line = line.removeprefix(_BOM)
            number += 1
            if number % 20_000 == 0:
                progress(raw.tell() / size)
            yield line


def _unpacked(raw: BinaryIO) -> BinaryIO:
    start = raw.read(2)
    raw.seek(0)
    return cast(BinaryIO, gzip.GzipFile(fileobj=raw, mode="rb")) if start == _GZIP else raw


def _refuse_wide(path: Path, start: bytes) -> None:
    if start.startswith(_WIDE) or b"\x00" in start[:64]:
        raise UsageError(f"{path} is not UTF-8 text (UTF-16, or no text at all); convert it: `iconv -t UTF-8`")
