"""The one error tree of Solaris.

    SolarisError                 every error that we raise on purpose
    ├── UsageError               the call can't be carried out as written (exit code 2)
    │   └── ConfigError          a setting is unknown, missing or of the wrong type
    ├── BadRecord                one record breaks a rule of its topic: dead letter, counted, the partition goes on
    ├── BundleError              a model bundle is missing, torn, or of another embedding space
    ├── TopicError               topics are missing or disagree (partition counts, co-partitioning)
    ├── StateError               a state directory can't be used as it is
    ├── BrokerError              the embedded broker did not start, answer or stop
    └── FatalError               the fault is the world's, not the record's (disk full, broker gone): stop, commit nothing

Whose fault it is decides what becomes of a record, so an error's class says it:

    the record's    BadRecord, and whatever our code raises that is not in the next line (ValueError, KeyError, …): it happens
                    again with this record and with no other. Retried, then dead-lettered; the partition goes on.
    ours            FatalError, StateError (our own store is damaged, foreign or full) and MemoryError: the next record would fail
                    in the same way. The process stops with the sentence, commits nothing, and is started again.

So code that reads a record never raises StateError for what stands in it, and code that reads our own rows never BadRecord.

A message says what happened, where (file, topic, partition, offset, key) and what to do about it.
"""

from __future__ import annotations


class SolarisError(Exception):
    """Root of the tree; `str()` is one sentence for people."""

    exit_code = 1


class UsageError(SolarisError):
    """The call can't be carried out as written."""

    exit_code = 2


class ConfigError(UsageError):
    """A setting is unknown, missing or of the wrong type."""


class BadRecord(SolarisError):
    """One record breaks a rule of its topic.

    `reason` is one of `schemas.deadletters.REASONS` and is what the counters are keyed by.
    """

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(f"{reason}: {sentence}")
        self.reason = reason
        self.sentence = sentence


class BundleError(SolarisError):
    """A model bundle is missing, torn, or of another embedding space."""


class TopicError(SolarisError):
    """Topics are missing or disagree."""


class StateError(SolarisError):
    """A state directory can't be used as it is."""


class BrokerError(SolarisError):
    """The embedded broker did not start, answer or stop."""


class FatalError(SolarisError):
    """The fault is not the record's: the process stops without committing, with a non-zero exit."""
