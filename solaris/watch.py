"""Watching a live playback: joins what was asked with what came back, shows it while it runs, sums it up at the end.

In: requests as they are sent (with their outcomes), results as they come, the workers' stats. Out: a table on the
terminal, a summary. Never sends anything.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table

from agents.kafka import KafkaConfig
from agents.player import Played
from agents.results import ResultReader
from schemas.log import LoggedRequest
from schemas.ranking import TIERS, RankedResult
from solaris.workers import Workers

WAIT_S_MAX = 60.0
"""How long to wait, after the last request, for results that are still missing."""
PLAIN_EVERY_S = 5.0
PROBABILITY_MIN = 1e-6


@dataclass(frozen=True)
class Summary:
    """What a playback came to; `facts` is its JSON."""

    events: int
    requests: int
    results: int
    repeats: int
    missing: int
    coverage: dict[str, float]
    fm: dict[str, Any]
    latency_ms: dict[str, float]
    log_loss: dict[str, float]
    ranked_pairs: int

    def facts(self) -> dict[str, Any]:
        """The summary as one JSON object."""
        return {
            "events": self.events,
            "requests": self.requests,
            "results": self.results,
            "repeats": self.repeats,
            "ranked_pairs": self.ranked_pairs,
            "coverage": self.coverage,
            "fm": self.fm,
            "latency_ms": self.latency_ms,
            "log_loss": self.log_loss,
        }

    def sentence(self) -> str:
        """The same for people."""
        tiers = ", ".join(f"{tier} {share:.1%}" for tier, share in self.coverage.items())
        dropped = ", ".join(f"{reason} {count:,}" for reason, count in sorted(self.fm["dropped"].items())) or "none"
        base, solaris = self.log_loss["base"], self.log_loss["solaris"]
        change = f" ({abs(base - solaris) / base:.2%} {'better' if solaris < base else 'worse'})" if base > 0 else ""
        return (
            f"{self.events:,} events and {self.requests:,} requests played; {self.results:,} results, {self.missing} missing, "
            f"{self.repeats} repeated.\n"
            f"Ranked pairs by tier: {tiers}.\n"
            f"FM pairs: {self.fm['asked']:,} asked ({self.fm['asked'] / max(1, self.ranked_pairs):.2f} per ranked pair), "
            f"{self.fm['computed']:,} computed; not asked or not computed: {dropped}.\n"
            f"Request to result: p50 {self.latency_ms['p50']:.1f} ms, p99 {self.latency_ms['p99']:.1f} ms, "
            f"p99.9 {self.latency_ms['p99_9']:.1f} ms.\n"
            f"Log loss on the played requests: {base:.4f} without embeddings, {solaris:.4f} with{change}."
        )


class Watch:
    """Counts of one playback. `sent` is called from the player's thread, everything else from the watching one."""

    def __init__(self, kafka: KafkaConfig, fm_before: dict[str, Any]) -> None:
        """`fm_before`: what `fm_counts` gave before the playback, so that only its own FM work is counted."""
        self._fm_before = fm_before
        self._reader = ResultReader(kafka)
        self._lock = threading.Lock()
        self._open: dict[tuple[str, str], tuple[float, LoggedRequest]] = {}
        self._seen: set[tuple[str, str]] = set()
        self.requests = self.repeats = self.degraded = 0
        self.tiers: Counter[str] = Counter()
        self._latency_ms: list[float] = []
        self._losses: list[tuple[float, float]] = []

    def sent(self, request: LoggedRequest) -> None:
        """A request goes out now."""
        with self._lock:
            self._open[str(request.user_id), str(request.request_id)] = (time.monotonic(), request)
            self.requests += 1

    def poll(self, timeout_s: float) -> int:
        """Take the results of up to `timeout_s` seconds; how many came."""
        came = 0
        for result, _message in self._reader.poll(timeout_s):
            self._take(result, time.monotonic())
            came += 1
        return came

    @property
    def open(self) -> int:
        """Requests without a result."""
        return len(self._open)

    @property
    def results(self) -> int:
        """Requests with a result."""
        return len(self._seen)

    def _take(self, result: RankedResult, now: float) -> None:
        key = (result.user_id, result.request_id)
        with self._lock:
            found = self._open.pop(key, None)
        if found is None:
            self.repeats += key in self._seen
            return
        self._seen.add(key)
        at, request = found
        self._latency_ms.append((now - at) * 1000)
        self.degraded += "degraded" in result.flags
        labels = dict(zip(map(str, request.candidates), request.labels, strict=True))
        for item in result.items:
            self.tiers[item.tier] += 1
            if item.score is not None and item.shadow_score is not None:
                label = labels[item.item_id]
                self._losses.append((_log_loss(item.shadow_score, label), _log_loss(item.score, label)))

    def percentiles(self) -> dict[str, float]:
        """Request to result, in ms."""
        if not self._latency_ms:
            return {"p50": math.nan, "p99": math.nan, "p99_9": math.nan}
        p50, p99, p999 = np.percentile(self._latency_ms, (50, 99, 99.9))
        return {"p50": round(float(p50), 2), "p99": round(float(p99), 2), "p99_9": round(float(p999), 2)}

    def coverage(self) -> dict[str, float]:
        """Share of ranked pairs by tier."""
        pairs = max(1, sum(self.tiers.values()))
        return {tier: round(self.tiers[tier] / pairs, 4) for tier in TIERS}

    def log_loss(self) -> dict[str, float]:
        """Mean log loss of the base ranker and of the ranker with vectors, over the same pairs."""
        if not self._losses:
            return {"base": math.nan, "solaris": math.nan}
        base, solaris = np.mean(self._losses, axis=0)
        return {"base": round(float(base), 5), "solaris": round(float(solaris), 5)}

    def fm(self, workers: Workers) -> dict[str, Any]:
        """FM pairs asked, computed and dropped by reason since the beginning."""
        now, before = fm_counts(workers), self._fm_before
        dropped = {reason: n - before["dropped"].get(reason, 0) for reason, n in now["dropped"].items()}
        return {
            "asked": now["asked"] - before["asked"],
            "computed": now["computed"] - before["computed"],
            "dropped": {reason: n for reason, n in dropped.items() if n},
        }

    def summary(self, played: Played, workers: Workers) -> Summary:
        """The end."""
        return Summary(
            events=played.events,
            requests=self.requests,
            results=self.results,
            repeats=self.repeats,
            missing=self.open,
            coverage=self.coverage(),
            fm=self.fm(workers),
            latency_ms=self.percentiles(),
            log_loss=self.log_loss(),
            ranked_pairs=sum(self.tiers.values()),
        )


def fm_counts(workers: Workers) -> dict[str, Any]:
    """FM pairs asked, computed, and dropped by reason, from the stats of the speculate and infer workers."""
    speculate, infer = workers.stats("speculate").get("counts", {}), workers.stats("infer").get("counts", {})
    dropped = Counter(speculate.get("dropped", {})) + Counter(infer.get("dropped", {}))
    return {
        "asked": int(speculate.get("admitted", 0)),
        "computed": int(infer.get("pairs_computed", 0)),
        "dropped": {reason: int(count) for reason, count in sorted(dropped.items())},
    }


def show(
    console: Console, watch: Watch, played: Played, span: tuple[int, int], workers: Workers, playing: threading.Thread
) -> None:
    """Show the playback until everything is answered, or nothing has come for a minute."""
    said = progressed = time.monotonic()
    with Live(console=console, refresh_per_second=4, transient=False) as live:
        while playing.is_alive() or watch.open:
            workers.check()
            now = time.monotonic()
            if watch.poll(0.25) or playing.is_alive():
                progressed = now
            if now - progressed > WAIT_S_MAX:
                return
            if console.is_terminal:
                live.update(_table(watch, played, span, workers))
            elif now - said > PLAIN_EVERY_S:
                said = now
                live.console.print(_line(watch, played, span))
        if console.is_terminal:
            live.update(_table(watch, played, span, workers))


def _done(played: Played, span: tuple[int, int]) -> float:
    first, last = span
    return min(1.0, max(0.0, (played.last_ts - first) / max(1, last - first)))


def _line(watch: Watch, played: Played, span: tuple[int, int]) -> str:
    tiers = " ".join(f"{tier} {share:.0%}" for tier, share in watch.coverage().items())
    return (
        f"{_done(played, span):4.0%}  {played.events:,} events, {watch.results:,}/{watch.requests:,} results; {tiers}; "
        f"p99 {watch.percentiles()['p99']:.0f} ms; {played.held_s:.0f} s of waiting for the workers"
    )


def _table(watch: Watch, played: Played, span: tuple[int, int], workers: Workers) -> Table:
    fm = watch.fm(workers)
    latency, loss = watch.percentiles(), watch.log_loss()
    table = Table(title="Solaris, live", show_header=False, title_justify="left")
    table.add_row("played", f"{_done(played, span):.0%}   {played.events:,} events, {watch.requests:,} requests")
    table.add_row("held back", f"{played.held_s:.0f} s of waiting for the workers")
    table.add_row("results", f"{watch.results:,}   {watch.open:,} open, {watch.repeats} repeated")
    table.add_row("coverage", "   ".join(f"{tier} {share:.1%}" for tier, share in watch.coverage().items()))
    table.add_row("FM pairs", f"{fm['asked']:,} asked, {fm['computed']:,} computed")
    table.add_row("dropped", ", ".join(f"{reason} {count:,}" for reason, count in fm["dropped"].items()) or "none")
    table.add_row(
        "latency", f"p50 {latency['p50']:.1f} ms   p99 {latency['p99']:.1f} ms   p99.9 {latency['p99_9']:.1f} ms"
    )
    table.add_row("log loss", f"{loss['base']:.4f} base, {loss['solaris']:.4f} with embeddings")
    return table


def _log_loss(probability: float, label: int) -> float:
    p = min(max(probability, PROBABILITY_MIN), 1 - PROBABILITY_MIN)
    return -math.log(p if label else 1 - p)
