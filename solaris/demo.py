"""The demo: a script over the commands that a user has. Kafka, a log, training, topics, three workers, a playback, a summary.

In: a log or none, and where to work. Out: exit code 0 and a JSON line if every request has its result. Never: a
shortcut that a user of the commands doesn't have.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from agents.groups import worker_lag
from agents.kafka import KafkaConfig
from agents.player import Player
from schemas.errors import SolarisError, UsageError
from schemas.log import Log
from solaris.broker import Broker
from solaris.lifeline import tied
from solaris.progress import PlayProgress
from solaris.watch import Summary, Watch, fm_counts, show
from solaris.workers import Workers

DAY_MS = 24 * 3_600_000
GENERATED = ("--users", "400", "--items", "700", "--days", "8")
AHEAD_MS_MAX = 300_000
"""Event time that the workers finish before more is played: an FM that answers within 5 minutes, however fast the playback."""

STATS_S = 1.5
"""The workers' stats files are at most this old."""

console = Console(stderr=True)


@dataclass(frozen=True)
class DemoConfig:
    """`played`: share of the log's requests, at its end, that are played live; the rest trains the models."""

    log: Path | None
    out: Path
    partitions: int
    played: float
    ttl: str
    pairs_per_ranked: float
    seed: int
    keep: bool
    bundle: Path | None = None


def run_demo(config: DemoConfig) -> None:
    """Everything from the broker to the summary. Raises `SolarisError`; whatever was started is stopped."""
    if config.out.exists() and not config.keep:
        _remove_earlier(config.out)
    config.out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        say("starting Kafka")
        broker = stack.enter_context(Broker.start(config.out / "broker", port=0, tied_to_us=True))
        settings = _settings(config, broker.bootstrap)
        folder = _log(config)
        log = Log(folder)
        split = split_ts(log, config.played)
        bundle = config.bundle or _trained(config, folder, split, settings)
        command("topics", "create", "--partitions", config.partitions, settings=settings)
        say("starting one speculate, one infer and one serve worker")
        kafka = KafkaConfig(bootstrap=broker.bootstrap)
        workers = stack.enter_context(Workers(bundle, config.out, settings))
        workers.wait_until_ready()
        summary = _play(kafka, log, split, workers)
    console.print(summary.sentence())
    print(json.dumps(summary.facts()), flush=True)
    if summary.missing:
        raise SolarisError(f"{summary.missing} of {summary.requests} requests have no result; see {config.out}/*.log")


def _play(kafka: KafkaConfig, log: Log, split: int, workers: Workers) -> Summary:
    """Warm the workers up with the day before, then play on while watching."""
    lag = worker_lag(kafka)
    first = max(log.manifest.first_ts, split - DAY_MS)
    warm = Player(kafka, lag=lag, ahead_ms_max=AHEAD_MS_MAX, on_progress=PlayProgress())
    say("playing the catalogue and the day before, so that the caches are as warm as on any day")
    warm.catalogue(log)
    warm.play(log, first, split)
    warm.settle()
    time.sleep(STATS_S)
    watch = Watch(kafka, fm_counts(workers))
    player = Player(kafka, lag=lag, ahead_ms_max=AHEAD_MS_MAX, on_request=watch.sent)
    say("playing the rest live: events and ranking requests")
    failed: list[BaseException] = []

    def play() -> None:
        try:
            player.play(log, split)
        except BaseException as error:  # noqa: BLE001 - handed to the main thread, which raises it
            failed.append(error)

    playing = threading.Thread(target=play, name="player", daemon=True)
    playing.start()
    span = (split, log.manifest.last_ts)
    show(console, watch, player.played, span, workers, playing)
    if failed:
        raise failed[0]
    player.settle()
    time.sleep(STATS_S)
    return watch.summary(player.played, workers)


def split_ts(log: Log, played: float) -> int:
    """The event time at which the last `played` share of the requests begins."""
    if not 0 < played < 1:
        raise UsageError(f"--played is {played}; give a share between 0 and 1")
    times = [int(request.ts or 0) for request in log.requests()]
    if len(times) < 50:
        raise UsageError(
            f"{log.folder} has {len(times)} requests; the demo needs 50 or more (import with --construct to make them up)"
        )
    return times[int(len(times) * (1 - played))]


def _log(config: DemoConfig) -> Path:
    if config.log is not None and (config.log / "log.json").is_file():
        return config.log
    folder = config.out / "log"
    if (folder / "log.json").is_file():
        return folder
    if config.log is None:
        say("generating a log (click log with known probabilities)")
        command("generate", "--out", folder, *GENERATED, "--seed", config.seed)
    else:
        say(f"importing {config.log}")
        command("import", config.log, "--out", folder, "--construct", "--seed", config.seed)
    return folder


def _trained(config: DemoConfig, folder: Path, split: int, settings: dict[str, str]) -> Path:
    bundle = config.out / "bundle"
    say("training on what comes before the played part")
    options = ("--until-ts", split, "--seed", config.seed, "--force", "--allow-no-gain")
    command("train", folder, "--out", bundle, *options, settings=settings)
    return bundle


def _settings(config: DemoConfig, bootstrap: str) -> dict[str, str]:
    return {
        "SOLARIS_KAFKA__BOOTSTRAP": bootstrap,
        "SOLARIS_SERVE__TTL_MS": config.ttl,
        "SOLARIS_SERVE__SHADOW": "true",
        "SOLARIS_SERVE__GENERATION_RECORDS": "100",
        "SOLARIS_TRANSPORT__COMMIT_MS": "50",
        "SOLARIS_VERIFY__PAIRS_PER_RANKED": str(config.pairs_per_ranked),
    }


def _remove_earlier(out: Path) -> None:
    """Replace an earlier demo's folder, and nothing else."""
    known = {"log", "bundle", "broker", "state"}
    strange = [p.name for p in out.iterdir() if p.name not in known and p.suffix not in {".log", ".json"}]
    if strange:
        raise UsageError(f"{out} holds {strange[0]}, which no demo wrote; name another --out")
    shutil.rmtree(out)


def command(*arguments: Any, settings: dict[str, str] | None = None) -> None:
    """Run one of our commands as a user would, its output on stderr."""
    line = [sys.executable, "-m", "solaris", *map(str, arguments)]
    console.print(f"[dim]$ solaris {' '.join(map(str, arguments))}[/dim]", soft_wrap=True)
    done = subprocess.run(tied(line), env=os.environ | (settings or {}), stdout=sys.stderr, check=False)
    if done.returncode:
        raise SolarisError(f"`solaris {arguments[0]}` ended with exit code {done.returncode}; its message is above")


def say(words: str) -> None:
    """One step of the story."""
    console.print(f"[bold]→ {words}[/bold]")
