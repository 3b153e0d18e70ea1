"""MovieLens 100k: a folder with `u.data` and `u.item`, or RecBole's atomic files `ml-100k.inter` and `ml-100k.item`.

In: the folder or the ratings file. Out: rows, a rating of 4 or 5 as `like`, a lower one as `dislike`, so that a history keeps
the sign and the counters count likes only; an item's category is its first genre. The catalogue was there before the log.
"""

from __future__ import annotations

import re
from pathlib import Path

from schemas.errors import UsageError
from solaris.importers.lines import Progress, head, lines
from solaris.importers.rows import Rows

LIKED_MIN = 4.0
# fmt: off
GENRES = [
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime",
    "Documentary", "Drama", "Fantasy", "Film-Noir", "Horror", "Musical",
    "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
]
# fmt: on
_INTER_HEADER = b"user_id:token\titem_id:token\trating:float\ttimestamp:float"
_DATA = re.compile(rb"\d+\t\d+\t[1-5]\t\d{9,10}\s*$")


def sniff(path: Path, start: bytes) -> bool:
    """Whether `path` is a folder with ratings, or a ratings file of either kind."""
    if path.is_dir():
        return _ratings(path) is not None
    line = start.partition(b"\n")[0].rstrip()
    return line == _INTER_HEADER or bool(_DATA.match(line))


def read(path: Path, rows: Rows, progress: Progress) -> None:
    """Add every good rating and the items' genres; count every other row by reason. Raises `UsageError`."""
    ratings = _ratings(path) if path.is_dir() else path
    if ratings is None:
        raise UsageError(f"{path} holds neither u.data nor a .inter file; name the folder `ml-100k` or the file itself")
    atomic = head(ratings).startswith(_INTER_HEADER)
    for number, line in enumerate(lines(ratings, rows, progress)):
        if not line.strip() or (atomic and number == 0):
            continue
        fields = line.rstrip(b"\r\n").split(b"\t")
        if len(fields) != 4:
            rows.drop("wrong_number_of_fields" if line.endswith(b"\n") else "last_line_cut")
            continue
        try:
            value, seconds = float(fields[2]), float(fields[3])
            ts = round(seconds * 1000)
        except (ValueError, OverflowError):
            rows.drop("rating_or_ts_not_a_number")
            continue
        if not 0.5 <= value <= 5:
            rows.drop("rating_outside_0.5..5")
            continue
        rows.add(fields[0], fields[1], b"like" if value >= LIKED_MIN else b"dislike", ts)
    _catalogue(ratings, rows, atomic=atomic)


def _ratings(folder: Path) -> Path | None:
    found = [folder / "u.data", *sorted(folder.glob("*.inter"))]
    return next((path for path in found if path.is_file()), None)


def _catalogue(ratings: Path, rows: Rows, *, atomic: bool) -> None:
    """Genres from the file beside the ratings, if there is one."""
    path = ratings.with_suffix(".item") if atomic else ratings.with_name("u.item")
    if not path.is_file():
        return
    genre_column = 0
    for number, line in enumerate(lines(path, rows)):
        fields = line.rstrip(b"\r\n").split(b"\t" if atomic else b"|")
        if atomic and number == 0:
            names = [name.partition(b":")[0] for name in fields]
            if b"class" not in names:
                return
            genre_column = names.index(b"class")
            continue
        genre = _first_genre(fields, genre_column, atomic=atomic)
        if genre:
            rows.describe(fields[0], genre)
        elif line.strip():
            rows.drop("item_without_genre")


def _first_genre(fields: list[bytes], column: int, *, atomic: bool) -> bytes:
    if atomic:
        return fields[column].partition(b" ")[0] if len(fields) > column else b""
    flags = fields[5:]
    if len(fields) != 5 + len(GENRES) or b"1" not in flags:
        return b""
    return GENRES[flags.index(b"1")].encode()
