"""Dispatch: batches close for three reasons, drops are named and counted, offsets finish in order, answers never swap places."""

from __future__ import annotations

import numpy as np
import pytest

from schemas.inference import FmRequest
from streams.dispatch import REASONS, Dispatcher, InferConfig, Offered


def _offered(
    offset: int,
    user: str = "u",
    items: str = "abc",
    as_of: int = 0,
    append_ms: int = 0,
    deadline_ms: int = 1000,
    partition: int = 0,
) -> Offered:
    n = len(items)
    numbers = np.arange(n, dtype=np.float32)
    request = FmRequest(
        user, 7, as_of, deadline_ms, 0, 0, list(items), numbers, numbers + 10, np.arange(n, dtype=np.uint8), [],
        np.zeros(0, np.uint8), np.zeros(0, np.int64),
    )  # fmt: skip
    return Offered(partition, offset, append_ms, request)


def _dispatcher(**settings: int) -> Dispatcher:
    return Dispatcher(InferConfig(**{"batch_pairs_max": 6, "delay_ms_max": 20, "deadline_margin_ms": 100, **settings}))


def _offsets(batch: list[Offered]) -> list[int]:
    return [offered.offset for offered in batch]


def _drops(dispatcher: Dispatcher) -> dict[str, int]:
    return {reason: count for reason, count in dispatcher.dropped.items() if count}


def test_a_batch_closes_by_size() -> None:
    dispatcher = _dispatcher()
    dispatcher.offer([_offered(0, "a")], 0)
    assert dispatcher.next_batch(0) == []
    dispatcher.offer([_offered(1, "b"), _offered(2, "c")], 1)
    assert _offsets(dispatcher.next_batch(1)) == [0, 1]
    assert dispatcher.next_batch(1) == []
    assert dispatcher.queued_pairs == 3


def test_a_batch_closes_by_delay() -> None:
    dispatcher = _dispatcher()
    assert dispatcher.wait_ms(0) is None
    dispatcher.offer([_offered(0, "a")], 5)
    dispatcher.offer([_offered(1, "b", "x")], 24)
    assert dispatcher.wait_ms(24) == 1
    assert dispatcher.next_batch(24) == []
    assert _offsets(dispatcher.next_batch(25)) == [0, 1]


def test_a_batch_closes_before_a_deadline() -> None:
    dispatcher = _dispatcher(delay_ms_max=10_000)
    dispatcher.offer([_offered(0, "a"), _offered(1, "b", "x", deadline_ms=500)], 0)
    assert dispatcher.next_batch(399) == []
    assert dispatcher.wait_ms(399) == 1
    assert _offsets(dispatcher.next_batch(400)) == [0, 1]


def test_drain_closes_whatever_is_there() -> None:
    dispatcher = _dispatcher()
    dispatcher.offer([_offered(0)], 0)
    assert _offsets(dispatcher.next_batch(0, drain=True)) == [0]
    assert dispatcher.next_batch(0, drain=True) == []


def test_a_request_larger_than_a_batch_goes_alone() -> None:
    dispatcher = _dispatcher(batch_pairs_max=2)
    dispatcher.offer([_offered(0, "a", "x"), _offered(1, "b", "abcdef"), _offered(2, "c", "x")], 0)
    assert [_offsets(dispatcher.next_batch(0, drain=True)) for _ in range(3)] == [[0], [1], [2]]


@pytest.mark.parametrize(("now", "dropped"), [(999, 0), (1000, 1), (1001, 1)])
@pytest.mark.parametrize("waits", [False, True])
def test_past_its_deadline_nothing_reaches_the_model(now: int, dropped: int, waits: bool) -> None:
    dispatcher = _dispatcher(deadline_margin_ms=0, delay_ms_max=10_000)
    dispatcher.offer([_offered(0), _offered(1, "later", deadline_ms=9000)], 0 if waits else now)
    assert dispatcher.dropped["deadline"] == (0 if waits else dropped)
    assert _offsets(dispatcher.next_batch(now, drain=True)) == [0, 1][dropped:]
    assert dispatcher.dropped["deadline"] == dropped
    assert dispatcher.dropped_pairs["deadline"] == 3 * dropped
    assert dispatcher.finished() == ({0: 1} if dropped else {})
    assert dispatcher.queued_pairs == 0


def test_the_deadline_counts_from_the_append_time() -> None:
    dispatcher = _dispatcher(deadline_margin_ms=0)
    dispatcher.offer([_offered(0, append_ms=5000, deadline_ms=100)], 5099)
    assert _offsets(dispatcher.next_batch(5099, drain=True)) == [0]


def test_a_full_queue_drops_the_oldest() -> None:
    dispatcher = _dispatcher(queue_pairs_max=7)
    dispatcher.offer([_offered(n, f"u{n}") for n in range(5)], 0)
    assert _drops(dispatcher) == {"queue_full": 3}
    assert dispatcher.dropped_pairs["queue_full"] == 9
    assert dispatcher.finished() == {0: 3}
    assert _offsets(dispatcher.next_batch(0, drain=True)) == [3, 4]
    dispatcher.offer([_offered(5, items="abcdefghi")], 0)  # larger than the queue: it still has to be done
    assert _offsets(dispatcher.next_batch(0, drain=True)) == [5]


def test_a_newer_request_supersedes_pair_by_pair() -> None:
    dispatcher = _dispatcher()
    dispatcher.offer([_offered(0, items="abc", as_of=1), _offered(1, items="ab", as_of=1, user="other")], 0)
    dispatcher.offer([_offered(2, items="cad", as_of=2)], 0)
    batch = dispatcher.next_batch(0, drain=True)
    assert [offered.request.items for offered in batch] == [["b"], ["a", "b"], ["c", "a", "d"]]
    lesser = batch[0].request
    assert (lesser.p_asked.tolist(), lesser.value.tolist(), lesser.sources.tolist()) == ([1.0], [11.0], [1])
    assert dispatcher.dropped_pairs["superseded"] == 2
    assert _drops(dispatcher) == {}
    assert dispatcher.queued_pairs == 0


def test_a_request_that_loses_all_its_pairs_is_finished() -> None:
    dispatcher = _dispatcher()
    dispatcher.offer(
        [_offered(0, items="ab", as_of=1), _offered(1, items="ab", as_of=2), _offered(2, items="a", as_of=2)], 0
    )
    assert _drops(dispatcher) == {"superseded": 1, "duplicate": 1}
    (last,) = dispatcher.next_batch(0, drain=True)
    assert last.offset == 1
    assert dispatcher.finished() == {0: 1}
    dispatcher.done([last])
    assert dispatcher.finished() == {0: 3}
    assert len(dispatcher) == dispatcher.queued_pairs == 0


def test_the_same_pair_may_be_asked_again_once_it_is_handed_out() -> None:
    dispatcher = _dispatcher()
    dispatcher.offer([_offered(0)], 0)
    dispatcher.next_batch(0, drain=True)
    dispatcher.offer([_offered(1)], 0)
    assert _offsets(dispatcher.next_batch(0, drain=True)) == [1]


def test_an_item_named_twice_is_done_once() -> None:
    dispatcher = _dispatcher()
    dispatcher.offer([_offered(0, items="aba")], 0)
    (only,) = dispatcher.next_batch(0, drain=True)
    assert (only.request.items, only.request.value.tolist()) == (["a", "b"], [10.0, 11.0])


def test_offsets_finish_in_order_per_partition() -> None:
    dispatcher = _dispatcher(batch_pairs_max=3)
    dispatcher.offer([_offered(4, "a"), _offered(9, "b"), _offered(7, "c", partition=1), _offered(11, "d", "")], 0)
    first, second, third = (dispatcher.next_batch(0, drain=True) for _ in range(3))
    dispatcher.done(second)
    assert dispatcher.finished() == {}
    dispatcher.done(third)
    assert dispatcher.finished() == {1: 8}
    dispatcher.done(first)
    assert dispatcher.finished() == {0: 12}  # the request without items at 11 is finished, too
    assert dispatcher.finished() == {}


def test_a_record_read_twice_is_not_finished_before_it_is_done() -> None:
    dispatcher = _dispatcher()
    dispatcher.offer([_offered(0)], 0)
    batch = dispatcher.next_batch(0, drain=True)
    dispatcher.offer([_offered(0)], 0)
    assert dispatcher.next_batch(0, drain=True) == []
    assert dispatcher.finished() == {}
    dispatcher.done(batch)
    assert dispatcher.finished() == {0: 1}


def test_revoked_partitions_are_forgotten() -> None:
    dispatcher = _dispatcher()
    dispatcher.offer([_offered(0, "a"), _offered(5, "b", partition=1), _offered(6, "c", partition=1)], 0)
    dispatcher.revoke([1])
    assert dispatcher.queued_pairs == 3
    batch = dispatcher.next_batch(0, drain=True)
    assert _offsets(batch) == [0]
    dispatcher.done([*batch, _offered(5, "b", partition=1)])
    assert dispatcher.finished() == {0: 1}
    dispatcher.offer([_offered(5, "b", partition=1)], 0)  # and may come back
    assert _offsets(dispatcher.next_batch(0, drain=True)) == [5]


@pytest.mark.parametrize("seed", range(10))
def test_everything_offered_is_finished_exactly_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    dispatcher = _dispatcher(queue_pairs_max=20, batch_pairs_max=8, deadline_margin_ms=5)
    answered: list[tuple[int, int]] = []
    next_offset, committed, now = [0, 0], {0: 0, 1: 0}, 0
    for _ in range(300):
        now += int(rng.integers(0, 15))
        partition = int(rng.integers(2))
        items = "".join(rng.choice(list("abcdef"), rng.integers(0, 5)))
        fresh = _offered(
            next_offset[partition],
            f"u{partition}{rng.integers(4)}",
            items,
            now,
            now - int(rng.integers(60)),
            80,
            partition,
        )
        next_offset[partition] += 1
        dispatcher.offer([fresh], now)
        assert dispatcher.queued_pairs == sum(waiting.live for waiting in dispatcher._queue) <= 20
        batch = dispatcher.next_batch(now)
        assert sum(len(offered.request.items) for offered in batch) <= 8
        assert all(now < offered.deadline_at for offered in batch)
        answered += [(offered.partition, offered.offset) for offered in batch]
        dispatcher.done(batch)
        for partition, offset in dispatcher.finished().items():
            assert offset > committed[partition]
            committed[partition] = offset
    while batch := dispatcher.next_batch(now, drain=True):
        dispatcher.done(batch)
        answered += [(offered.partition, offered.offset) for offered in batch]
    committed.update(dispatcher.finished())
    assert committed == {0: next_offset[0], 1: next_offset[1]}
    assert len(set(answered)) == len(answered)
    for partition in (0, 1):
        mine = [offset for where, offset in answered if where == partition]
        assert mine == sorted(mine)
    assert dispatcher._pairs == {}
    assert set(dispatcher.dropped) == set(REASONS)
