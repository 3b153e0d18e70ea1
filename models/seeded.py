"""Parameters from a seed, and one thread: what makes a model's bytes repeatable.

In: a module and a generator. Out: the same module, every parameter drawn from that generator. Never touches torch's global random
state: layers are `Linear`, without torch's own initialisation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from schemas.errors import BundleError

State = dict[str, npt.NDArray[np.generic]]
"""A model's parameters and buffers by name, as a safetensors file holds them."""


def generator(seed: int) -> torch.Generator:
    """A generator of one's own; the global one is never used."""
    made = torch.Generator()
    made.manual_seed(seed)
    return made


class Linear(nn.Module):
    """[..., inputs] → [..., outputs], without values until `initialise`: torch's own would draw from the global generator."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.linear(inputs, self.weight, self.bias)


def initialise(module: nn.Module, source: torch.Generator, table_std: float = 0.1) -> None:
    """Draw every parameter in order: tables (names that end in `table`) normal, matrices by their fan-in, vectors zero."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("table"):
                parameter.normal_(0.0, table_std, generator=source)
            elif parameter.ndim >= 2:
                bound = math.sqrt(3.0 / max(1, parameter.shape[-1]))
                parameter.uniform_(-bound, bound, generator=source)
            else:
                parameter.zero_()


def state_of(module: nn.Module) -> State:
    """Copies of a module's parameters and buffers."""
    return {name: value.detach().cpu().numpy().copy() for name, value in module.state_dict().items()}


def load_state(module: nn.Module, state: Mapping[str, npt.NDArray[np.generic]], what: str) -> None:
    """Fill a module; every name and shape must fit. Raises `BundleError`."""
    wanted = module.state_dict()
    for name, value in wanted.items():
        if name not in state:
            raise BundleError(
                f"the {what} has no tensor {name!r}; it was written for another configuration, train it anew"
            )
        if tuple(state[name].shape) != tuple(value.shape):
            raise BundleError(
                f"the {what}'s tensor {name!r} is {list(state[name].shape)}, its configuration says {list(value.shape)}; "
                "train it anew"
            )
    tensors: dict[str, Tensor] = {name: torch.from_numpy(np.array(state[name])) for name in wanted}
    module.load_state_dict(tensors)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run torch on `count` threads inside and put the old number back: sums then have one order on every machine."""
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
