"""Infer: a batch of fm-requests through the engine, and whatever goes wrong kept to the request that it belongs to.

In: requests and their offsets. Out: for each, in order, its `Embeddings` or the `BadRecord` for its dead letter. Never: lets one
bad request fail its batch, swaps answers, or dead-letters good requests because the engine itself is broken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from schemas.errors import BadRecord, FatalError
from schemas.inference import Embeddings, FmRequest

Answer = Embeddings | BadRecord


class EngineLike(Protocol):
    """`models.engine.Engine`, or a foundation model of one's own behind the same call."""

    def embed(self, requests: Sequence[FmRequest], offsets: Sequence[int] | None = None) -> Sequence[Answer]:
        """One answer a request, in order."""


class Infer:
    """`bisected` counts batches that failed as a whole, `failed` requests that failed alone, `refused` vectors left out."""

    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine
        self.requests = self.pairs = self.bisected = self.failed = self.refused = 0

    def run(self, requests: Sequence[FmRequest], offsets: Sequence[int]) -> list[Answer]:
        """One answer a request, in order, with `request_offset` set.

        Raises `FatalError` when the engine fails on a request of our own making too, or answers something else than it was asked:
        then the fault is the engine's (a lost device, a wrong model), and no record is to blame.
        """
        answers = self._embed(requests, offsets) if requests else []
        self.requests += len(requests)
        self.pairs += sum(len(request.items) for request in requests)
        self.failed += sum(isinstance(answer, BadRecord) for answer in answers)
        return [self._checked(*one) for one in zip(requests, offsets, answers, strict=True)]

    def _embed(self, requests: Sequence[FmRequest], offsets: Sequence[int]) -> list[Answer]:
        try:
            answers = list(self._engine.embed(requests, offsets))
        except FatalError:
            raise
        except Exception as error:  # noqa: BLE001 a model of the user's own may raise anything
            return self._failed(requests, offsets, error)
        if len(answers) != len(requests):
            raise FatalError(f"the engine gave {len(answers)} answers to {len(requests)} requests; check its `embed`")
        return answers

    def _failed(self, requests: Sequence[FmRequest], offsets: Sequence[int], error: Exception) -> list[Answer]:
        """Both halves apart, down to the one that fails alone."""
        if len(requests) > 1:
            self.bisected += 1
            half = len(requests) // 2
            return self._embed(requests[:half], offsets[:half]) + self._embed(requests[half:], offsets[half:])
        self._probe(requests[0], error)
        return [BadRecord("handler", f"the model failed on this request: {type(error).__name__}: {error}")]

    def _probe(self, request: FmRequest, error: Exception) -> None:
        """Ask the engine something harmless; if that fails as well, the engine is broken, not the request."""
        none, empty = np.zeros(0, np.int64), np.zeros(1, np.float32)
        probe = FmRequest(
            "probe", request.space, request.as_of, request.deadline_ms, 0, 0, ["probe"], empty, empty, np.zeros(1, np.uint8),
            [], none.astype(np.uint8), none,
        )  # fmt: skip
        try:
            self._engine.embed([probe], [-1])
        except Exception as second:
            raise FatalError(
                f"the engine fails on every request ({type(second).__name__}: {second}; first: {error}); check device and bundle"
            ) from second

    def _checked(self, request: FmRequest, offset: int, answer: Answer) -> Answer:
        """The answer with its request's offset and without vectors that no reader would take."""
        if isinstance(answer, BadRecord):
            return answer
        if answer.user != request.user or answer.space != request.space or answer.as_of != request.as_of:
            raise FatalError(
                f"the engine answered user {answer.user!r}, space {answer.space} at fm-request offset {offset}, which asked for "
                f"user {request.user!r}, space {request.space}; answers must come in the order of the requests"
            )
        sound = np.isfinite(answer.scales) & (answer.scales > 0) & answer.codes.any(axis=1)
        if not sound.all():
            self.refused += len(sound) - int(sound.sum())
            if not sound.any():
                self.failed += 1
                return BadRecord("vector", f"all {len(sound)} vectors of this request are zero or not finite")
            items = [item for item, keep in zip(answer.items, sound.tolist(), strict=True) if keep]
            answer = replace(answer, items=items, scales=answer.scales[sound], codes=answer.codes[sound])
        return replace(answer, request_offset=offset)
