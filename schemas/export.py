"""JSON Schemas of the edge topics, generated from the types and committed under docs/schemas.

python -m schemas.export            write them
python -m schemas.export --check    exit 1 if a committed one is not what the types say
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec

from schemas.deadletters import DeadLetter
from schemas.events import Event, Item
from schemas.ranking import RankedResult, RankingRequest

EDGES: dict[str, type[msgspec.Struct]] = {
    "events": Event,
    "items": Item,
    "ranking-requests": RankingRequest,
    "ranked-results": RankedResult,
    "dead-letters": DeadLetter,
}
FOLDER = Path(__file__).resolve().parent.parent / "docs" / "schemas"


def rendered() -> dict[str, str]:
    """File name → text of every schema."""
    return {f"{topic}.json": json.dumps(msgspec.json.schema(kind), indent=2) + "\n" for topic, kind in EDGES.items()}


def main(arguments: list[str]) -> int:
    """Write or check the committed schemas; returns the exit code."""
    stale = [name for name, text in rendered().items() if not _same(FOLDER / name, text)]
    if "--check" in arguments:
        for name in stale:
            print(f"docs/schemas/{name} is not what schemas/ says; run `python -m schemas.export`", file=sys.stderr)
        return 1 if stale else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in rendered().items():
        (FOLDER / name).write_text(text)
    return 0


def _same(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text() == text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
