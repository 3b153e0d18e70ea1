"""Taobao's UserBehavior: `user,item,category,type,seconds`, no header, grouped by user.

In: the file, also gzipped. Out: rows (pv → view, fav → favorite). The set covers 2017-11-25 to 12-03 in China's time
(UTC+8); rows outside are faults of the set and are dropped, as is a last line that was cut.
"""

from __future__ import annotations

import re
from pathlib import Path

from solaris.importers.lines import Progress, lines
from solaris.importers.rows import Rows

TYPES = {b"pv": b"view", b"cart": b"cart", b"fav": b"favorite", b"buy": b"buy"}
FIRST_S = 1_511_539_200  # 2017-11-25T00:00:00+08:00
END_S = 1_512_316_800  # 2017-12-04T00:00:00+08:00
_LINE = re.compile(rb"\d+,\d+,\d+,(pv|cart|fav|buy),\d+\s*$")


def sniff(path: Path, start: bytes) -> bool:
    """Whether the first whole line is one of this set."""
    return path.is_file() and bool(_LINE.match(start.partition(b"\n")[0]))


def read(path: Path, rows: Rows, progress: Progress) -> None:
    """Add every good row; count every other one by reason."""
    for line in lines(path, rows, progress):
        fields = line.rstrip(b"\r\n").split(b",")
        if len(fields) != 5:
            if fields != [b""]:
                rows.drop("wrong_number_of_fields" if line.endswith(b"\n") else "last_line_cut")
            continue
        user, item, category, kind, seconds = fields
        event_type = TYPES.get(kind)
        if event_type is None:
            rows.drop("unknown_type")
        elif not seconds.isdigit() or len(seconds) > 12:
            rows.drop("ts_not_a_number")
        elif not FIRST_S <= int(seconds) < END_S:
            rows.drop("ts_outside_2017-11-25..12-03_utc+8")
        else:
            rows.add(user, item, event_type, int(seconds) * 1000, category)
