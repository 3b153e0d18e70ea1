"""Priors: what speculation starts from before it has seen a log of its own.

In: item statistics of the training window. Out: tensors for a bundle, and back. Item ids are kept as one UTF-8 blob with lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from models.features import F32, I32
from models.seeded import State
from schemas.errors import BundleError

_ASKED = "asked."


@dataclass(frozen=True, slots=True)
class Priors:
    """m items by id with their statistics, most popular first.

    `popularity` float32 [m] (events or positives in the training window's last 24 h), `covisit_index` int32 [m, K] (rows of
    `items`, -1 = none) with `covisit_weight` float32 [m, K], `asked`: weights of P(asked) by name, whatever shapes its owner wants.
    """

    items: list[str] = field(default_factory=list)
    popularity: F32 = field(default_factory=lambda: np.zeros(0, np.float32))
    covisit_index: I32 = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    covisit_weight: F32 = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    asked: dict[str, npt.NDArray[np.generic]] = field(default_factory=dict)

    def state(self) -> State:
        """The tensors that a bundle stores."""
        encoded = [name.encode() for name in self.items]
        return {
            "item_bytes": np.frombuffer(b"".join(encoded), np.uint8),
            "item_lengths": np.array([len(name) for name in encoded], np.int32),
            "popularity": np.asarray(self.popularity, np.float32),
            "covisit_index": np.asarray(self.covisit_index, np.int32),
            "covisit_weight": np.asarray(self.covisit_weight, np.float32),
            **{_ASKED + name: np.asarray(value) for name, value in self.asked.items()},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, npt.NDArray[np.generic]]) -> Priors:
        """Raises `BundleError` where the tensors don't fit each other."""
        try:
            lengths, blob = state["item_lengths"], state["item_bytes"].tobytes()
            ends = np.cumsum(lengths.astype(np.int64)).tolist()
            starts = [0, *ends[:-1]]
            items = [blob[start:end].decode() for start, end in zip(starts, ends, strict=True)] if ends else []
            priors = cls(
                items,
                state["popularity"].astype(np.float32),
                state["covisit_index"].astype(np.int32),
                state["covisit_weight"].astype(np.float32),
                {name.removeprefix(_ASKED): value for name, value in state.items() if name.startswith(_ASKED)},
            )
        except (KeyError, UnicodeDecodeError) as error:
            raise BundleError(
                f"the priors can't be read ({error!r}); make the bundle anew with `solaris train`"
            ) from None
        rows, shape = len(items), priors.covisit_index.shape
        fits = (
            len(blob) == (ends[-1] if ends else 0)
            and len(priors.popularity) == rows
            and shape == priors.covisit_weight.shape
            and shape[0] == rows
            and bool((priors.covisit_index < max(rows, 1)).all())
        )
        if not fits:
            raise BundleError("the priors' tensors don't fit each other; make the bundle anew with `solaris train`")
        return priors
