"""How far a playback is, for people: one line on stderr now and then.

In: what a player reports. Out: a line every five seconds, so that neither a long play nor a long wait is silent; stdout stays for
results.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agents.player import Played

PROGRESS_S = 5.0


class PlayProgress:
    """A player's `on_progress`."""

    def __init__(self) -> None:
        self._due = time.monotonic() + PROGRESS_S

    def __call__(self, played: Played) -> None:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + PROGRESS_S
            print(
                f"  {played.events:,} events and {played.requests:,} requests sent, up to ts {played.last_ts}; "
                f"{played.held_s:.0f} s of waiting for the workers",
                file=sys.stderr, flush=True,
            )  # fmt: skip
