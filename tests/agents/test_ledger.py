"""The commit arithmetic: nothing unfinished is committed and nothing stalls, whatever the order of completion."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agents.transport.ledger import Commit, Ledger, Partition, State, Ticket

P: Partition = ("events", 0)
Q: Partition = ("embeddings", 0)


def test_only_the_finished_prefix_is_committable() -> None:
    ledger = Ledger()
    ledger.assign(P, 10, None)
    first, second = ledger.add(P, 15), ledger.add(P, 30)
    assert first is not None
    assert second is not None
    ledger.begin(first, "a")
    ledger.begin(second, "b")
    ledger.done(second)
    assert ledger.committable(lambda _: "now") == {P: Commit(10, "a")}
    ledger.done(first)
    assert ledger.committable(lambda _: "now") == {P: Commit(30, "now")}


def test_the_mark_is_that_of_the_first_batch_after_the_prefix() -> None:
    ledger = Ledger()
    ledger.assign(P, 0, None)
    tickets = [ledger.add(P, end) for end in (5, 9, 12)]
    for ticket, mark in zip(tickets, "abc", strict=True):
        assert ticket is not None
        ledger.begin(ticket, mark)
    assert tickets[0] is not None
    ledger.done(tickets[0])
    assert ledger.committable(lambda _: "now") == {P: Commit(5, "b")}


def test_a_refused_commit_is_offered_again() -> None:
    ledger = Ledger()
    ledger.assign(P, 3, 3)
    assert ledger.committable(str) == {}
    ticket = ledger.add(P, 8)
    assert ticket is not None
    assert ledger.begin(ticket)
    ledger.done(ticket)
    offered = ledger.committable(lambda _: "")
    assert offered == {P: Commit(8, "")} == ledger.committable(lambda _: "")
    ledger.committed(offered)
    assert ledger.committable(lambda _: "") == {}


def test_a_gap_without_records_is_committed_with_what_comes_before_it() -> None:
    ledger = Ledger()
    ledger.assign(P, 0, None)
    ticket = ledger.add(P, 4)
    assert ticket is not None
    ledger.advance(P, 9)
    assert ledger.committable(lambda _: "")[P].offset == ledger.finished(P) == 0
    ledger.begin(ticket)
    ledger.done(ticket)
    assert ledger.committable(lambda _: "")[P].offset == ledger.finished(P) == 9
    ledger.advance(P, 11)
    assert ledger.committable(lambda _: "")[P].offset == ledger.finished(P) == 11
    ledger.revoke([P])
    assert ledger.finished(P) == 0


def test_reading_again_from_below_the_commit_never_takes_it_back() -> None:
    ledger = Ledger()
    ledger.assign(P, 100, 500)
    for end in (300, 500, 700):
        ticket = ledger.add(P, end)
        assert ticket is not None
        ledger.begin(ticket)
        ledger.done(ticket)
        assert ledger.committable(lambda _: "") == ({} if end <= 500 else {P: Commit(700, "")})


def test_before_a_revocation_what_has_not_begun_is_dropped_and_what_has_may_end() -> None:
    ledger = Ledger()
    ledger.assign(P, 0, None)
    at_work, waiting = ledger.add(P, 5), ledger.add(P, 9)
    assert at_work is not None
    assert waiting is not None
    ledger.begin(at_work)
    assert ledger.close([P, Q]) == [waiting]
    assert not ledger.begin(waiting)
    assert ledger.add(P, 20) is None
    ledger.advance(P, 30)
    ledger.done(at_work)
    assert ledger.committable(lambda _: "") == {P: Commit(5, "")}
    ledger.revoke([P])
    assert ledger.committable(lambda _: "") == {}


def test_a_batch_that_ends_after_its_partition_went_counts_for_nothing() -> None:
    ledger = Ledger()
    ledger.assign(P, 0, None)
    old = ledger.add(P, 50)
    assert old is not None
    ledger.begin(old)
    waiting = ledger.add(P, 60)
    assert waiting is not None
    ledger.assign(P, 20, 20)
    assert not ledger.begin(waiting)
    ledger.done(old)
    assert old.state is State.DROPPED
    assert ledger.committable(lambda _: "") == {}
    assert ledger.position(P) == 20


def test_misuse_is_loud() -> None:
    ledger = Ledger()
    ledger.assign(P, 10, None)
    with pytest.raises(ValueError, match="was read already"):
        ledger.add(P, 10)
    ticket = ledger.add(P, 11)
    assert ticket is not None
    with pytest.raises(ValueError, match="before it began"):
        ledger.done(ticket)


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=30),
    st.randoms(use_true_random=False),
)
def test_any_order_of_completion_ends_with_everything_committed(sizes: list[tuple[int, int]], random: object) -> None:
    """Each batch: some records, then a gap; ended in a random order, nothing in flight is ever below the commit."""
    ledger = Ledger()
    ledger.assign(P, 0, None)
    tickets: list[Ticket] = []
    for records, gap in sizes:
        ticket = ledger.add(P, ledger.position(P) + records)
        assert ticket is not None
        ledger.advance(P, ledger.position(P) + gap)
        ledger.begin(ticket, str(ticket.start))
        tickets.append(ticket)
    open_ = list(tickets)
    random.shuffle(open_)  # type: ignore[attr-defined]
    while open_:
        ledger.done(open_.pop())
        commit = ledger.committable(lambda _: "end")[P]
        assert commit.offset == min((ticket.start for ticket in open_), default=tickets[-1].end)
        assert commit.mark == (str(commit.offset) if open_ else "end")


class LedgerModel(RuleBasedStateMachine):
    """The ledger beside sets of offsets: `finished` of this assignment, and what the group holds over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.group: dict[Partition, int | None] = {P: None, Q: None}
        self.tickets: dict[Partition, list[Ticket]] = {P: [], Q: []}
        self.start: dict[Partition, int | None] = {P: None, Q: None}
        self.empty: dict[Partition, set[int]] = {P: set(), Q: set()}
        self.closing: set[Partition] = set()

    partitions = st.sampled_from([P, Q])

    @rule(partition=partitions, back=st.integers(0, 8))
    def assign(self, partition: Partition, back: int) -> None:
        """As after a rebalance: from the stamp, below what the group holds or at it."""
        held = self.group[partition]
        self.start[partition] = max(0, (held or 0) - back)
        self.ledger.assign(partition, self.start[partition] or 0, held)
        self.tickets[partition], self.empty[partition] = [], set()
        self.closing.discard(partition)

    @rule(partition=partitions)
    def close(self, partition: Partition) -> None:
        self.ledger.close([partition])
        self.closing.add(partition)

    @rule(partition=partitions)
    def revoke(self, partition: Partition) -> None:
        self.ledger.revoke([partition])
        self.tickets[partition], self.empty[partition], self.start[partition] = [], set(), None

    @rule(partition=partitions, rows=st.integers(1, 4))
    def add(self, partition: Partition, rows: int) -> None:
        if self.start[partition] is None or partition in self.closing:
            assert self.ledger.add(partition, 10_000) is None
            return
        ticket = self.ledger.add(partition, self.ledger.position(partition) + rows)
        assert ticket is not None
        self.tickets[partition].append(ticket)

    @rule(partition=partitions, gap=st.integers(0, 4))
    def advance(self, partition: Partition, gap: int) -> None:
        if self.start[partition] is None:
            return
        before = self.ledger.position(partition)
        self.ledger.advance(partition, before + gap)
        if partition not in self.closing:
            self.empty[partition] |= set(range(before, before + gap))

    @rule(partition=partitions, index=st.integers(0, 9))
    def begin(self, partition: Partition, index: int) -> None:
        if self.tickets[partition]:
            self.ledger.begin(self.tickets[partition][index % len(self.tickets[partition])])

    @precondition(lambda self: self.ledger.begun())
    @rule(index=st.integers(0, 9))
    def done(self, index: int) -> None:
        begun = self.ledger.begun()
        self.ledger.done(begun[index % len(begun)])

    @rule(accepted=st.booleans())
    def commit(self, accepted: bool) -> None:
        commits = self.ledger.committable(lambda _: "")
        if accepted:
            self.ledger.committed(commits)
            self.group.update({partition: commit.offset for partition, commit in commits.items()})

    @invariant()
    def never_commits_unfinished_work_and_never_stalls(self) -> None:
        commits = self.ledger.committable(lambda _: "")
        for partition in (P, Q):
            start = self.start[partition]
            if start is None:
                assert partition not in commits
                continue
            unfinished = [ticket.start for ticket in self.tickets[partition] if ticket.state is not State.DONE]
            reachable = min(unfinished, default=self.ledger.position(partition))
            held = self.group[partition]
            expected = reachable if held is None or reachable > held else None
            assert (commits[partition].offset if partition in commits else None) == expected
            covered = {offset for ticket in self.tickets[partition] for offset in range(ticket.start, ticket.end)}
            assert covered | self.empty[partition] == set(range(start, self.ledger.position(partition)))


LedgerModel.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestLedgerModel = LedgerModel.TestCase
