"""The compressor: the FM's D numbers to d int8 codes and one scale a vector, and back.

In: float32 [n, D] of the FM's last shared layer. Out: codes int8 [n, d] and scales float32 [n], of which `codes * scales` is the
vector that the ranker reads. Three encoders behind one interface, so that the simple ones stay a baseline. Two guards, from a
prototype that drifted to 2,700 on a nearly dead dimension: no dimension is divided by less than half the median standard
deviation, and everything is clipped at three of them. Never stores a vector that is not finite, nor codes that are all zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from models.encoders import random_projection
from models.features import F32
from models.seeded import State
from schemas.errors import BundleError

I8 = npt.NDArray[np.int8]
F64 = npt.NDArray[np.float64]

KINDS = ("autoencoder", "pca", "random")
CLIP = 3.0
"""In standard deviations, before the encoder and after it."""

SCALE_MIN = 1e-4
"""No code stands for less than this, so that a vector near zero does not become noise blown up."""

_CODE_MAX = 127


@dataclass(frozen=True, slots=True)
class CompressorConfig:
    """`kind` is one of KINDS; D → d; `hidden` and `epochs` are the autoencoder's."""

    kind: str = "autoencoder"
    dims: int = 64
    d: int = 16
    hidden: int = 48
    epochs: int = 12


class Compressor:
    """Standardise, encode, standardise, clip, quantise; all parameters fitted once (`models.train.fit_compressor`).

    State: `mean`, `std` [D]; `code_mean`, `code_std` [d]; an encoder and a decoder of one or two layers (`encode_0` [D, d] ...).
    """

    def __init__(self, config: CompressorConfig, state: Mapping[str, npt.NDArray[np.generic]]) -> None:
        if config.kind not in KINDS:
            raise BundleError(f"compressor kind {config.kind!r} is unknown; one of {', '.join(KINDS)}")
        self.config = config
        self._state = {name: np.asarray(value, np.float32) for name, value in state.items()}
        missing = {"mean", "std", "code_mean", "code_std", "encode_0", "decode_0"} - self._state.keys()
        if missing:
            raise BundleError(f"the compressor lacks {', '.join(sorted(missing))}; fit it anew")
        self._layers = {end: self._stack(end) for end in ("encode", "decode")}
        if self._state["mean"].shape != (config.dims,) or self._state["code_mean"].shape != (config.d,):
            raise BundleError("the compressor's tensors are not of its configuration's dimensions; fit it anew")

    @classmethod
    def untrained(cls, config: CompressorConfig, seed: int) -> Compressor:
        """A random projection with unit statistics: to try the pipes with."""
        projection = random_projection(config.dims, config.d, seed)
        figures = {
            "mean": np.zeros(config.dims, np.float32),
            "std": np.ones(config.dims, np.float32),
            "code_mean": np.zeros(config.d, np.float32),
            "code_std": np.ones(config.d, np.float32),
        }
        return cls(config, {**projection, **figures})

    def state(self) -> State:
        """The tensors that a bundle stores."""
        return dict(self._state)

    def usable(self, vectors: F32) -> npt.NDArray[np.bool_]:
        """bool [n]: which vectors are finite and not all zero; `encode` refuses the others."""
        return np.asarray(np.isfinite(vectors).all(axis=1) & (vectors != 0).any(axis=1))

    def encode(self, vectors: F32) -> tuple[I8, F32]:
        """Codes int8 [n, d] and scales float32 [n], every scale positive and no row of codes all zero.

        Raises ValueError, naming the rows, for vectors that are not `usable`; nothing is encoded then.
        """
        if vectors.ndim != 2 or vectors.shape[1] != self.config.dims:
            raise ValueError(f"vectors are {list(vectors.shape)}, the compressor takes [n, {self.config.dims}]")
        bad = np.flatnonzero(~self.usable(vectors))
        if len(bad):
            raise ValueError(
                f"{len(bad)} vectors are not finite or all zero (rows {bad[:5].tolist()}); refuse them first"
            )
        return quantise(self.project(vectors))

    def decode(self, codes: I8, scales: F32) -> F32:
        """float32 [n, d]: the small vectors as the ranker reads them."""
        return np.asarray(codes.astype(np.float32) * scales[:, None], np.float32)

    def reconstruct(self, small: F32) -> F32:
        """float32 [n, D]: the FM's vectors, as far as the small ones [n, d] still tell."""
        out = small * self._state["code_std"] + self._state["code_mean"]
        return np.asarray(self._run("decode", out) * self._state["std"] + self._state["mean"], np.float32)

    def project(self, vectors: F32) -> F32:
        """float32 [n, d]: the small vectors before quantisation, within ±CLIP."""
        return np.asarray(np.clip(self.codes(vectors), -CLIP, CLIP), np.float32)

    def codes(self, vectors: F32) -> F32:
        """float32 [n, d]: the encoder's output in its fitted deviations, not clipped."""
        raw = self._run("encode", self.standardise(vectors))
        return np.asarray((raw - self._state["code_mean"]) / self._state["code_std"], np.float32)

    def standardise(self, vectors: F32) -> F32:
        """float32 [n, D]: zero mean, unit deviation by the stored figures, clipped."""
        with np.errstate(over="ignore"):
            scaled = (vectors - self._state["mean"]) / self._state["std"]
        return np.asarray(np.clip(scaled, -CLIP, CLIP), np.float32)

    def error(self, vectors: F32) -> float:
        """Mean squared error of the round trip, int8 included, as a share of the variance of the standardised vectors."""
        inputs = self.standardise(vectors)
        back = self.standardise(self.reconstruct(self.decode(*self.encode(vectors))))
        variance = float(np.square(inputs - inputs.mean(0), dtype=np.float64).mean())
        return float(np.square(back - inputs, dtype=np.float64).mean()) / max(variance, 1e-12)

    def drift(self, vectors: F32) -> tuple[float, float]:
        """How far a batch lies from what was fitted: (largest shift of a mean in deviations, largest |log2| of std ratios).

        For the daily alarm. Deviations are floored here as they were when fitting.
        """
        shift = np.abs(vectors.mean(0) - self._state["mean"]) / self._state["std"]
        spread = np.abs(np.log2(floored_std(vectors) / self._state["std"]))
        return float(shift.max()), float(spread.max())

    def _stack(self, end: str) -> list[tuple[F32, F32]]:
        layers: list[tuple[F32, F32]] = []
        while f"{end}_{len(layers)}" in self._state:
            weight = self._state[f"{end}_{len(layers)}"]
            bias = self._state.get(f"{end}_{len(layers)}_bias", np.zeros(weight.shape[1], np.float32))
            layers.append((weight, bias))
        sizes = [layers[0][0].shape[0], *(weight.shape[1] for weight, _ in layers)]
        ends = (self.config.dims, self.config.d) if end == "encode" else (self.config.d, self.config.dims)
        if (sizes[0], sizes[-1]) != ends:
            raise BundleError(
                f"the compressor's {end}r maps {sizes[0]} to {sizes[-1]} numbers, not {ends[0]} to {ends[1]}"
            )
        return layers

    def _run(self, end: str, inputs: F32) -> F32:
        for index, (weight, bias) in enumerate(self._layers[end]):
            inputs = inputs @ weight + bias
            if index + 1 < len(self._layers[end]):
                inputs = np.tanh(inputs)
        return np.asarray(inputs, np.float32)


def quantise(small: F32) -> tuple[I8, F32]:
    """int8 codes [n, d] and one scale a vector [n]; |code * scale - x| ≤ scale / 2, or ≤ SCALE_MIN where the scale is at its floor.

    A row too small for its scale keeps one code of ±1 at its largest place: a row of zeros can't be told from a lost one.
    """
    largest = np.abs(small).max(axis=1)
    scales = np.maximum(largest / _CODE_MAX, SCALE_MIN).astype(np.float32)
    codes = np.clip(np.rint(small / scales[:, None]), -_CODE_MAX, _CODE_MAX).astype(np.int8)
    empty = np.flatnonzero(~codes.any(axis=1))
    if len(empty):
        place = np.abs(small[empty]).argmax(axis=1)
        codes[empty, place] = np.where(small[empty, place] < 0, -1, 1)
    return codes, scales


def floored_std(vectors: npt.NDArray[np.floating]) -> F32:
    """float32 [D]: standard deviations, none under half their median, none under 1e-6."""
    std = np.asarray(vectors, np.float64).std(axis=0)
    return np.asarray(np.maximum(std, max(0.5 * float(np.median(std)), 1e-6)), np.float32)
