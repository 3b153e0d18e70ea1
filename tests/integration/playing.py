"""A log sent in order from a thread, so that a test can disturb the workers meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from schemas.events import encode_event
from schemas.log import Log, LoggedRequest, merge
from schemas.ranking import RankingRequest, encode_request
from schemas.topics import EVENTS, RANKING_REQUESTS
from tests.integration.installation import Installation

RECORDS_PER_S = 60
STEADY = 0.8
"""Share of the log that goes out at a steady pace; the rest waits for `join`."""


class Playing:
    """Begins at once."""

    def __init__(self, here: Installation, log: Log) -> None:
        self._here = here
        self._records = [record for _, record in merge(log.events(), log.requests())]
        self._hurry = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._done = self._pool.submit(self._play)

    def join(self) -> None:
        """Send the rest and wait until the broker has everything."""
        self._hurry.set()
        self._done.result(60)
        self._pool.shutdown()

    def _play(self) -> None:
        for number, record in enumerate(self._records):
            key = str(record.user_id).encode()
            if isinstance(record, LoggedRequest):
                request = RankingRequest(record.request_id, record.user_id, record.candidates, record.ts)
                self._here.send(RANKING_REQUESTS, key, encode_request(request))
            else:
                self._here.send(EVENTS, key, encode_event(record))
            last_part = number > STEADY * len(self._records)
            self._hurry.wait(None if last_part else 1 / RECORDS_PER_S)
        self._here.flush()
