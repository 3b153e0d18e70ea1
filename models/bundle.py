"""A bundle: one folder with all trained parts and a manifest that says what they are and that they are whole.

In: models, or a folder. Out: a folder (written beside itself, then renamed), or models. Holds numbers only: safetensors and JSON;
a pickle is never read. The manifest names the embedding space, so that another model's vector is never mistaken for one of this.

    manifest.json                 format, space, d, configs, training window, metrics, sha256 of each file, hash of all of it
    foundation.safetensors        the FM                     ranker.safetensors   the ranker with vectors
    compressor.safetensors        its compressor             base.safetensors     the same ranker without any
    priors.safetensors            what speculation starts from
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from models.compressor import Compressor, CompressorConfig
from models.factory import load_factory
from models.foundation import FmConfig, FoundationLike, FoundationModel
from models.priors import Priors
from models.ranker import Ranker, RankerConfig, RankerLike
from models.seeded import State
from schemas.errors import BundleError
from schemas.keys import hash64

FORMAT = 1
PARTS = ("ranker", "base", "foundation", "compressor", "priors")
MANIFEST = "manifest.json"
_CONFIGS: dict[str, type] = {
    "ranker": RankerConfig,
    "base": RankerConfig,
    "foundation": FmConfig,
    "compressor": CompressorConfig,
}
_T = TypeVar("_T")


@dataclass(frozen=True)
class Bundle:
    """Trained parts of one embedding space. A part that was not loaded raises `BundleError` when it is asked for."""

    name: str
    """Name of the embedding space (FM and compressor together)."""
    d: int
    """Numbers a vector."""
    parts: Mapping[str, Any]
    training: Mapping[str, int] = field(default_factory=dict)
    """The training window, UTC ms of event time: `from_ms`, `to_ms`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    stored: Mapping[str, Any] = field(default_factory=dict)
    """The manifest as read; empty for a bundle that was built and not loaded."""

    @classmethod
    def build(
        cls,
        parts: Mapping[str, Any],
        name: str | None = None,
        training: Mapping[str, int] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Bundle:
        """A bundle from models in memory, checked against each other. Without a name the space is named by the hash of the FM and
        compressor, so that two spaces never share one."""
        unknown = set(parts) - set(PARTS)
        if unknown:
            raise BundleError(f"unknown part {sorted(unknown)[0]!r}; a bundle has {', '.join(PARTS)}")
        if name is None:
            digest = hashlib.sha256()
            for part in ("foundation", "compressor"):
                digest.update(_bytes(parts[part]) if part in parts else b"")
            name = f"fm-{digest.hexdigest()[:12]}"
        return cls(name, _dimension(parts), dict(parts), dict(training or {}), dict(metrics or {}))

    @classmethod
    def load(
        cls,
        folder: str | Path,
        parts: Sequence[str] = PARTS,
        device: str = "cpu",
        factories: Mapping[str, str] | None = None,
    ) -> Bundle:
        """Read some parts of a bundle; `factories` gives specs of models of one's own by part (from settings, see `load_factory`).

        Every file read is checked against its hash first. Raises `BundleError`; parts that the bundle never had are left out.
        """
        folder = Path(folder)
        manifest = _read_manifest(folder)
        made = {part: _load_part(folder, manifest, part, device, factories or {}) for part in parts}
        present = {part: model for part, model in made.items() if model is not None}
        if present and _dimension(present, manifest["d"]) != manifest["d"]:
            raise BundleError(f"{folder}: the manifest says d = {manifest['d']}, its models differ; {_REMEDY}")
        return cls(manifest["name"], manifest["d"], present, manifest["training"], manifest["metrics"], manifest)

    def save(self, folder: str | Path, replace_old: bool = False) -> Path:
        """Write the bundle: into a temporary folder beside it, synced, then renamed. An existing folder is refused, or replaced."""
        folder = Path(folder)
        if folder.exists() and not replace_old:
            raise BundleError(f"{folder} exists; name a new folder, or ask for it to be replaced")
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            for part, model in self.parts.items():
                _write(work / f"{part}.safetensors", _bytes(model))
            _write(work / MANIFEST, json.dumps(self.manifest, indent=1, sort_keys=True).encode())
            work.chmod(0o755)
            if folder.exists():
                aside = work.with_name(f"{work.name}.old")
                folder.rename(aside)
                work.rename(folder)
                shutil.rmtree(aside)
            else:
                work.rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return folder

    @cached_property
    def manifest(self) -> Mapping[str, Any]:
        """The manifest: as read, or of the models in memory."""
        if self.stored:
            return self.stored
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "name": self.name,
            "space": str(self.space),
            "d": self.d,
            "configs": {part: asdict(model.config) for part, model in self.parts.items() if part in _CONFIGS},
            "training": dict(self.training),
            "metrics": dict(self.metrics),
            "files": {
                f"{part}.safetensors": hashlib.sha256(_bytes(model)).hexdigest() for part, model in self.parts.items()
            },
        }
        # through JSON, so that a bundle in memory and the same one loaded have one manifest
        plain: dict[str, Any] = json.loads(json.dumps(manifest, allow_nan=False))
        return {**plain, "hash": _hash(plain)}

    @property
    def space(self) -> int:
        """The embedding space as records carry it: unsigned 64 bits of the name's hash."""
        return hash64(self.name)

    @property
    def hash(self) -> str:
        """Hash of the manifest, and so of every file."""
        return str(self.manifest["hash"])

    @property
    def ranker(self) -> RankerLike:
        return cast(RankerLike, self._part("ranker"))

    @property
    def base(self) -> RankerLike:
        return cast(RankerLike, self._part("base"))

    @property
    def foundation(self) -> FoundationLike:
        return cast(FoundationLike, self._part("foundation"))

    @property
    def compressor(self) -> Compressor:
        return cast(Compressor, self._part("compressor"))

    @property
    def priors(self) -> Priors:
        return cast(Priors, self._part("priors"))

    def has(self, part: str) -> bool:
        """Whether a part is there and was loaded."""
        return part in self.parts

    def _part(self, part: str) -> Any:
        if part not in self.parts:
            raise BundleError(f"bundle {self.name} has no part {part!r} here; load it by name, or {_REMEDY}")
        return self.parts[part]


_REMEDY = "make a bundle with `solaris train LOG --out BUNDLE`"


def untrained_bundle(
    seed: int,
    d: int = 8,
    content_dims: int = 0,
    tasks: tuple[str, ...] = ("positive",),
    buckets: tuple[int, int, int] = (1 << 12, 1 << 8, 1 << 10),
    priors: Priors | None = None,
) -> Bundle:
    """A small bundle with random weights and every part: to try the pipes with, before anything was trained.

    `buckets`: items, categories, users.
    """
    items, categories, users = buckets
    ranker = RankerConfig(
        d=d, content_dims=content_dims, item_buckets=items, category_buckets=categories, user_buckets=users
    )
    fm = FmConfig(tasks=tasks, item_buckets=items, category_buckets=categories, content_dims=content_dims, width=16)
    foundation = FoundationModel.from_state(fm, FoundationModel.untrained(fm, seed).state())
    parts = {
        "ranker": Ranker.untrained(ranker, seed + 1),
        "base": Ranker.untrained(replace(ranker, vectors=False), seed + 2),
        "foundation": foundation,
        "compressor": Compressor.untrained(CompressorConfig(kind="random", dims=fm.dims, d=d), seed + 3),
        "priors": priors or Priors(),
    }
    return Bundle.build(parts)


def _bytes(model: Any) -> bytes:
    """A part as a safetensors file; the same tensors always give the same bytes."""
    state: State = model.state()
    return save_tensors({name: np.ascontiguousarray(state[name]) for name in sorted(state)})


def _dimension(parts: Mapping[str, Any], default: int = 0) -> int:
    """The d that compressor and ranker agree on. Raises `BundleError` where they, or the FM and its compressor, differ."""
    found = {
        part: parts[part].config.d
        for part in ("compressor", "ranker")
        if isinstance(parts.get(part), (Compressor, Ranker))
    }
    if len(set(found.values())) > 1:
        raise BundleError(
            f"the compressor makes {found['compressor']} numbers, the ranker reads {found['ranker']}; {_REMEDY}"
        )
    if "foundation" in parts and "compressor" in parts:
        made, taken = parts["foundation"].config.dims, parts["compressor"].config.dims
        if made != taken:
            raise BundleError(f"the foundation model gives {made} numbers, the compressor takes {taken}; {_REMEDY}")
    return next(iter(found.values()), default)


def _hash(manifest: Mapping[str, Any]) -> str:
    body = {key: value for key, value in manifest.items() if key != "hash"}
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise BundleError(f"{folder} is no bundle (it has no {MANIFEST}); {_REMEDY}") from None
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} can't be read ({error}); {_REMEDY}") from None
    wanted = {"format", "name", "space", "d", "configs", "training", "metrics", "files", "hash"}
    if not isinstance(manifest, dict) or not wanted <= manifest.keys():
        raise BundleError(f"{path} is not a bundle's manifest; {_REMEDY}")
    if manifest["format"] != FORMAT:
        raise BundleError(f"{path} has format {manifest['format']}, this release reads {FORMAT}; {_REMEDY}")
    if _hash(manifest) != manifest["hash"] or str(hash64(manifest["name"])) != manifest["space"]:
        raise BundleError(f"{path} was changed after it was written (its hash differs); {_REMEDY}")
    return manifest


def _load_part(folder: Path, manifest: Mapping[str, Any], part: str, device: str, factories: Mapping[str, str]) -> Any:
    if part not in PARTS:
        raise BundleError(f"unknown part {part!r}; a bundle has {', '.join(PARTS)}")
    path = folder / f"{part}.safetensors"
    if path.name not in manifest["files"] and part not in factories:
        return None
    state = _tensors(path, manifest["files"][path.name]) if path.name in manifest["files"] else {}
    if part in factories:
        return load_factory(factories[part])(manifest["configs"].get(part, {}), state)
    if part == "priors":
        return Priors.from_state(state)
    config: Any = _config(_CONFIGS[part], manifest["configs"].get(part), part)
    if part == "foundation":
        return FoundationModel.from_state(config, state).to(device)
    if part == "compressor":
        return Compressor(config, state)
    return Ranker(config, state)


def _tensors(path: Path, sha256: str) -> State:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BundleError(f"{path} can't be read ({error}); {_REMEDY}") from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise BundleError(f"{path} is torn or was changed (its sha256 is not the manifest's); {_REMEDY}")
    try:
        return cast(State, load_tensors(data))
    except SafetensorError as error:
        raise BundleError(f"{path} is not a safetensors file ({error}); {_REMEDY}") from None


def _config(kind: type[_T], values: Any, part: str) -> _T:
    try:
        return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})
    except (AttributeError, TypeError) as error:
        raise BundleError(
            f"the manifest's configuration of {part!r} is not this release's ({error}); {_REMEDY}"
        ) from None
