"""The generator beside a bare encoder: a whole log on disk against encoding the same events one struct at a time.

    .venv/bin/python -m benches.generate [--users N] [--days D]

The last line is JSON: impressions_per_s, seconds, cpu_seconds, impressions, rss_mb, ratio.msgspec_encode (how many times the
processor time of only encoding the log's events with msgspec; choosing, judging, drawing, sorting and writing included in ours).
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

from schemas.events import encode_event
from schemas.log import Log
from solaris.generate import generate
from solaris.world import GenerateConfig


def main() -> None:
    """Generate once, encode its events once, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--users", type=int, default=4000)
    parser.add_argument("--days", type=float, default=10.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="solaris-bench-") as place:
        folder = Path(place) / "log"
        begin, cpu = time.perf_counter(), time.process_time()
        manifest = generate(GenerateConfig(users=options.users, days=options.days), folder)
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        events = list(Log(folder).events())
    impressions = sum(event.event_type == "impression" for event in events)
    begin = time.process_time()
    for event in events:
        encode_event(event)
    encoding = time.process_time() - begin
    print(f"{impressions:,} impressions in {seconds:.1f} s, {rss_mb:.0f} MB; {manifest.note}")
    figures = {
        "impressions_per_s": round(impressions / seconds),
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "impressions": impressions,
        "rss_mb": round(rss_mb),
        "ratio": {"msgspec_encode": round(cpu / encoding, 2)},
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
