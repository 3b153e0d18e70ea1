"""The FM of a replay: one embedding space all along, refreshed after each span that it had not seen when it wrote vectors.

In: the trainer's rows as they come. Out: embeddings for the pipeline, and what the FM of each moment says of any rows. Never: a
vector or a probability of an FM that has learned anything at or after the moment that it speaks of.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from models.bundle import Bundle
from models.compressor import Compressor
from models.engine import Engine
from models.features import F32, I64
from models.fit import Schedule
from models.foundation import FoundationModel
from models.rows import FmRows
from models.train import F64, FmTraining, foundation_outputs, train_foundation
from schemas.errors import BadRecord
from schemas.inference import Embeddings, FmRequest
from streams.items import ItemIndex

REFRESH = Schedule(epochs=3, batch=256, rate=5e-3, tail=0.0)
"""Of a day's rows, items alone: .3883 a week later, against .3900 with one epoch at 2e-3, .3890 with one of everything at 1e-3
(which leaves the space) and .3908 of a frozen FM (docs/log.md)."""


class Refreshed:
    """`embed` is what the pipeline calls; `refresh` learns rows that have ended; `outputs` looks back."""

    def __init__(
        self, model: FoundationModel, compressor: Compressor, items: ItemIndex, training: FmTraining, seed: int
    ) -> None:
        self.model, self.compressor = model, compressor
        self._items, self._training, self._seed = items, training, seed
        self._models: list[FoundationModel] = [model]
        self._since: list[int] = [0]
        self._engine = self._made()

    def embed(self, requests: Sequence[FmRequest], offsets: Sequence[int]) -> list[Embeddings | BadRecord]:
        """Embed with the FM as it is now."""
        return self._engine.embed(requests, offsets)

    def refresh(self, rows: FmRows) -> None:
        """Learn rows that lie behind, from the present weights, in the same space (`FmTraining.anchored`)."""
        self.model, _ = train_foundation(rows, self.model.config, self._seed, self._training, self.model)
        self._models.append(self.model)
        self._since.append(int(rows.ts[-1]) + 1)
        self._engine = self._made()

    def outputs(self, rows: FmRows, age_ms: I64 | None = None) -> tuple[F32, F64]:
        """Vectors [n, D] and probabilities [n, tasks] of every pair by the FM of its moment; `age_ms` int64 [r]: by the FM and
        the history of so much earlier."""
        age = np.zeros(len(rows.ts), np.int64) if age_ms is None else age_ms
        number = np.searchsorted(np.array(self._since), rows.ts - age, side="right") - 1
        n, tasks = len(rows.request), len(self.model.config.tasks)
        vectors, chances = np.zeros((n, self.model.config.dims), np.float32), np.zeros((n, tasks))
        for model in np.unique(number):
            mine = number[rows.request] == model
            made = foundation_outputs(self._models[model], rows, self._training.device, age, number == model)
            vectors[mine], chances[mine] = made[0][mine], made[1][mine]
        return vectors, chances

    def _made(self) -> Engine:
        bundle = Bundle.build({"foundation": self.model, "compressor": self.compressor}, name="replay")
        return _AnySpace(bundle, self._items, self._training.device)


class _AnySpace(Engine):
    """An engine for the replay's space 0, which has no name yet."""

    def __init__(self, bundle: Bundle, items: ItemIndex, device: str) -> None:
        super().__init__(bundle, items, device)
        self.space = 0
