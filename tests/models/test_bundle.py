"""The bundle: what was saved is what is loaded, and whatever is torn, missing or foreign is refused with a remedy."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from models.bundle import PARTS, Bundle, _hash, untrained_bundle
from models.factory import load_factory
from models.features import Features
from models.priors import Priors
from models.ranker import Ranker, RankerConfig
from schemas.errors import BundleError, UsageError
from schemas.keys import hash64
from tests.models.made_up import features_of

PRIORS = Priors(
    ["a", "ä:b", "長い名前"],
    np.array([3, 2, 1], np.float32),
    np.array([[1, 2], [0, -1], [-1, -1]], np.int32),
    np.array([[0.5, 0.25], [1, 0], [0, 0]], np.float32),
    {"weights": np.arange(5.0), "count": np.array([7])},
)


@pytest.fixture(scope="module")
def made() -> Bundle:
    return untrained_bundle(1, content_dims=4, priors=PRIORS)


@pytest.fixture(scope="module")
def saved(made: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.save(tmp_path_factory.mktemp("bundles") / "one")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "bundle"))


def rewrite(folder: Path, **changes: object) -> None:
    """Change the manifest, with a hash that fits again."""
    manifest = json.loads((folder / "manifest.json").read_text()) | changes
    manifest["hash"] = _hash(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_round_trip(made: Bundle, saved: Path) -> None:
    loaded = Bundle.load(saved)
    assert (loaded.name, loaded.d, loaded.space, loaded.hash) == (made.name, made.d, hash64(made.name), made.hash)
    features, vectors = features_of(1, [30, 5])
    for part in ("ranker", "base"):
        before, after = getattr(made, part).score(features, vectors), getattr(loaded, part).score(features, vectors)
        assert before.tobytes() == after.tobytes()
    priors = loaded.priors
    assert priors.items == PRIORS.items
    assert np.array_equal(priors.covisit_index, PRIORS.covisit_index)
    assert np.array_equal(priors.covisit_weight, PRIORS.covisit_weight)
    assert np.array_equal(priors.asked["weights"], np.arange(5.0))
    assert sorted(path.name for path in saved.iterdir()) == sorted(
        [*(f"{p}.safetensors" for p in PARTS), "manifest.json"]
    )
    assert [path.name for path in saved.parent.iterdir()] == ["one"]  # nothing temporary is left


def test_the_same_models_give_the_same_hash_and_others_another_space() -> None:
    one, again, other = untrained_bundle(1), untrained_bundle(1), untrained_bundle(2)
    assert (one.hash, one.space) == (again.hash, again.space)
    assert other.space != one.space


def test_only_the_parts_asked_for_are_read(folder: Path) -> None:
    (folder / "foundation.safetensors").unlink()
    bundle = Bundle.load(folder, parts=("ranker", "priors"))
    assert bundle.has("ranker")
    assert not bundle.has("foundation")
    with pytest.raises(BundleError, match="no part 'foundation'"):
        _ = bundle.foundation


def test_an_existing_folder_is_replaced_only_on_demand(folder: Path) -> None:
    other = untrained_bundle(2)
    with pytest.raises(BundleError, match="exists"):
        other.save(folder)
    other.save(folder, replace_old=True)
    assert Bundle.load(folder, parts=()).hash == other.hash
    assert [path.name for path in folder.parent.iterdir()] == ["bundle"]


def test_missing(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(BundleError, match=r"is no bundle.*solaris train LOG --out BUNDLE"):
        Bundle.load(tmp_path / "nothing")
    (folder / "ranker.safetensors").unlink()
    with pytest.raises(BundleError, match=r"ranker.safetensors can't be read.*solaris train"):
        Bundle.load(folder)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("how", ["cut", "flipped", "empty"])
def test_torn(folder: Path, part: str, how: str) -> None:
    path = folder / f"{part}.safetensors"
    data = bytearray(path.read_bytes())
    if how == "flipped":
        data[len(data) // 2] ^= 1
    path.write_bytes({"cut": bytes(data[: len(data) // 2]), "flipped": bytes(data), "empty": b""}[how])
    with pytest.raises(BundleError, match=f"{part}.safetensors is torn"):
        Bundle.load(folder)


def test_a_changed_manifest_is_refused(folder: Path) -> None:
    path = folder / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"d": 8', '"d": 9'))
    with pytest.raises(BundleError, match="hash differs"):
        Bundle.load(folder)
    path.write_text(text[: len(text) // 2])
    with pytest.raises(BundleError, match="can't be read"):
        Bundle.load(folder)
    path.write_text("[]")
    with pytest.raises(BundleError, match="not a bundle's manifest"):
        Bundle.load(folder)


def test_another_format_dimension_or_setting_is_refused(folder: Path) -> None:
    configs = json.loads((folder / "manifest.json").read_text())["configs"]
    rewrite(folder, format=2)
    with pytest.raises(BundleError, match="format 2, this release reads 1"):
        Bundle.load(folder)
    rewrite(folder, format=1, d=16)
    with pytest.raises(BundleError, match="d = 16"):
        Bundle.load(folder)
    rewrite(folder, d=8, configs=configs | {"ranker": configs["ranker"] | {"d": 16}})
    with pytest.raises(BundleError, match="its configuration says"):
        Bundle.load(folder)
    rewrite(folder, configs=configs | {"ranker": configs["ranker"] | {"depth": 3}})
    with pytest.raises(BundleError, match="configuration of 'ranker'"):
        Bundle.load(folder)


class _Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (_spring, ("sprung",))


def _spring(_: str) -> None:
    raise AssertionError("a pickle was loaded")


def test_a_pickle_is_refused_even_with_a_hash_that_fits(folder: Path) -> None:
    data = pickle.dumps(_Trap())
    (folder / "ranker.safetensors").write_bytes(data)
    files = json.loads((folder / "manifest.json").read_text())["files"]
    rewrite(folder, files=files | {"ranker.safetensors": hashlib.sha256(data).hexdigest()})
    with pytest.raises(BundleError, match="not a safetensors file"):
        Bundle.load(folder)


def test_models_that_do_not_fit_are_not_bundled(made: Bundle) -> None:
    with pytest.raises(BundleError, match="the compressor makes 8 numbers, the ranker reads 4"):
        Bundle.build({**made.parts, "ranker": Ranker.untrained(RankerConfig(d=4, item_buckets=9, user_buckets=9), 1)})
    with pytest.raises(BundleError, match="unknown part 'rankr'"):
        Bundle.build({"rankr": made.ranker})


def test_priors_that_do_not_fit_are_refused() -> None:
    state = PRIORS.state()
    for name, value in (("popularity", np.zeros(2, "f")), ("covisit_index", np.full((3, 2), 9, np.int32))):
        with pytest.raises(BundleError, match="don't fit"):
            Priors.from_state({**state, name: value})
    with pytest.raises(BundleError, match="can't be read"):
        Priors.from_state({name: value for name, value in state.items() if name != "item_bytes"})
    assert Priors.from_state(Priors().state()).items == []


OWN_MODEL = """
import numpy as np
class Half:
    def __init__(self, config, state): self.config, self.state = config, state
    def score(self, features, vectors=None): return np.full(len(features.request), 0.5)
    score_many = score
    def item_vectors(self, bucket, category, content): return content
"""


def test_a_ranker_of_ones_own_from_a_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_MODEL)
    bundle = Bundle.load(folder, parts=("ranker",), factories={"ranker": f"{tmp_path / 'own.py'}:Half"})
    features: Features = features_of(1, [3])[0]
    assert bundle.ranker.score(features).tolist() == [0.5] * 3
    assert bundle.ranker.config["d"] == 8  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("models.ranker:Ranker", "one of Solaris' own packages"),
        ("streams:anything", "one of Solaris' own packages"),
        ("nothing_here.at_all:make", "can't import"),
        ("json:nothing", "no callable 'nothing'"),
        ("json", "write package.module:factory"),
        ("nowhere/own.py:make", "there is no file"),
    ],
)
def test_specs_that_lead_nowhere_say_why(spec: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        load_factory(spec)


def test_a_file_with_a_mistake_says_which(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("def make(:\n")
    with pytest.raises(UsageError, match=r"own\.py"):
        load_factory(f"{path}:make")
    path.write_text("def make(config, state):\n    return 7\n")  # mended: not remembered as broken
    assert load_factory(f"{path}:make")({}, {}) == 7
