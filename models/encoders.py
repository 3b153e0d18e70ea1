"""Three ways from D standardised numbers to d: a trained autoencoder, principal components, a random projection.

In: float32 [n, D], already standardised and clipped. Out: the layers of an encoder and a decoder by name (`encode_0` [D, d] ...),
as `models.compressor` runs them. Seeded; the two without training are the baselines that the first must beat.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import nn

from models.features import F32
from models.seeded import Linear, State, generator, initialise, state_of, threads

ROWS_MAX = 50_000
"""Rows that the autoencoder is trained on, taken evenly."""


def random_projection(dims: int, d: int, seed: int) -> State:
    """Encoder and decoder of a random orthonormal projection [D, d]: the baseline that needs no data."""
    square = np.random.default_rng(seed).standard_normal((dims, d))
    basis = np.linalg.qr(square)[0].astype(np.float32)
    return {"encode_0": basis, "decode_0": np.ascontiguousarray(basis.T)}


def principal(inputs: F32, d: int) -> State:
    """The d directions of largest variance, encoder [D, d] and its transpose."""
    centre = inputs.mean(0, dtype=np.float64)
    basis = np.linalg.eigh(np.cov(inputs.astype(np.float64).T))[1][:, ::-1][:, :d]
    basis = basis * np.where(
        basis[np.abs(basis).argmax(0), np.arange(d)] < 0, -1.0, 1.0
    )  # a sign of its own, not LAPACK's
    encode, decode = basis.astype(np.float32), np.ascontiguousarray(basis.T).astype(np.float32)
    return {
        "encode_0": encode,
        "encode_0_bias": (-centre @ basis).astype(np.float32),
        "decode_0": decode,
        "decode_0_bias": centre.astype(np.float32),
    }


def autoencoder(inputs: F32, d: int, hidden: int, epochs: int, seed: int) -> State:
    """Two tanh layers each way, trained on the squared error of the standardised vectors."""
    sizes = (inputs.shape[1], hidden, d, hidden, inputs.shape[1])
    net = nn.ModuleList([Linear(a, b) for a, b in pairwise(sizes)])
    initialise(net, generator(seed))
    data = torch.from_numpy(inputs[:: max(1, len(inputs) // ROWS_MAX)])
    source, size = np.random.default_rng(seed), 512
    optimiser = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.0, fused=True)
    steps = -(-len(data) // size) * epochs
    with threads(1):
        done = 0
        for _ in range(epochs):
            for part in np.array_split(source.permutation(len(data)), -(-len(data) // size)):
                batch = data[torch.from_numpy(part)]
                small = net[1](net[0](batch).tanh())
                gap = net[3](net[2](small).tanh()) - batch
                for group in optimiser.param_groups:
                    group["lr"] = 3e-3 * (1.0 - 0.95 * done / steps)
                optimiser.zero_grad(set_to_none=True)
                gap.square().mean().backward()
                optimiser.step()
                done += 1
    weights = state_of(net)
    names = ("encode_0", "encode_1", "decode_0", "decode_1")
    out: State = {}
    for index, name in enumerate(names):
        out[name] = np.ascontiguousarray(weights[f"{index}.weight"].T)
        out[f"{name}_bias"] = weights[f"{index}.bias"]
    return out
