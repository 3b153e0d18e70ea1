"""What of Faust and aiokafka the transport leans on: which methods, and why. Source hashes are in test_faust.py's table."""

from __future__ import annotations

import hashlib
import inspect
import textwrap
from typing import Any

from aiokafka.consumer import fetcher, group_coordinator, subscription_state
from faust.agents.agent import Agent
from faust.app.base import App
from faust.serializers.schemas import Schema
from faust.tables.recovery import Recovery
from faust.transport import conductor, consumer
from faust.transport.drivers import aiokafka as driver
from mode.threads import ServiceThread

OVERRIDDEN: tuple[Any, ...] = (
    consumer.Consumer.getmany,
    consumer.Consumer.wait_empty,
    consumer.Consumer.perform_seek,
    consumer.Consumer.on_partitions_revoked,
    consumer.Consumer.force_commit,
    consumer.Consumer.on_buffer_full,
    consumer.Consumer.on_buffer_drop,
    consumer.ThreadDelegateConsumer.subscribe,
    consumer.ThreadDelegateConsumer.seek_to_committed,
    driver.Consumer.verify_event_path,
    driver.Consumer._new_consumer_thread,
    driver.AIOKafkaConsumerThread._create_worker_consumer,
    driver.AIOKafkaConsumerThread.on_start,
    App.on_first_start,
    App._new_transport,
    App._new_producer_transport,
    Schema.decode,
    Schema.compile,
)

LEANED_ON: tuple[Any, ...] = (
    consumer.Consumer.commit,  # calls force_commit, one at a time
    consumer.Consumer.on_stop,  # wait_empty at the end
    consumer.Consumer._drain_messages,  # the loop around getmany
    App._on_partitions_revoked,  # stops the flow, clears the queues, wait_empty
    App._on_partitions_assigned,
    App._stop_consumer,
    Recovery._resume_streams,  # perform_seek, then the flow resumes
    Recovery._restart_recovery,  # IllegalStateError means "rebalancing again"
    Recovery.on_rebalance,
    conductor.Conductor._subscriber,
    conductor.Conductor._update_indices,  # topic.acks
    Agent.on_stop,
    fetcher.FetchResult.getall,
    fetcher.FetchResult.check_assignment,
    fetcher.PartitionRecords._unpack_records,
    fetcher.Fetcher._create_fetch_waiter,
    fetcher.Fetcher._get_actions_per_node,  # _prefetch_backoff
    fetcher.Fetcher.seek_to,
    ServiceThread.__init__,  # _close_thread_loop_on_stop
    ServiceThread._start_thread,
    group_coordinator.GroupCoordinator._do_commit_offsets,
    group_coordinator.GroupCoordinator.ensure_coordinator_known,
    group_coordinator.CoordinatorGroupRebalance.perform_group_join,
    group_coordinator.GroupCoordinator.check_errors,
    group_coordinator.GroupCoordinator.fetch_committed_offsets,
    group_coordinator.GroupCoordinator.reset_generation,  # generation -1
    group_coordinator.GroupCoordinator._on_join_prepare,
    group_coordinator.GroupCoordinator._on_join_complete,
    subscription_state.SubscriptionState.fetch_context,
)


def name(method: Any) -> str:
    """`module.Class.method`."""
    function = plain(method)
    return f"{function.__module__}.{function.__qualname__}"


def plain(method: Any) -> Any:
    """The function behind a decorator of Faust's: `Service.task` and `transitions_to` wrap theirs."""
    return inspect.unwrap(getattr(method, "fun", method))


def source_hash(method: Any) -> str:
    """Of the method's source without its indentation."""
    source = textwrap.dedent(inspect.getsource(plain(method)))
    return hashlib.sha256(source.encode()).hexdigest()[:16]
