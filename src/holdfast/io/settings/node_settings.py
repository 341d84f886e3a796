"""Makes a node from its part of the configuration."""

import secrets
import time
from typing import Final

from msgspec.structs import replace

from holdfast.config import schema
from holdfast.config.listener import Listener
from holdfast.config.schema import Config
from holdfast.io.event_loop import descriptors
from holdfast.io.event_loop.trace_export import tracer_for
from holdfast.io.settings.security_files import SecurityFiles, authenticates_users
from holdfast.log.journal.group_commit_delay import JournalWaits
from holdfast.log.journal.journal import Journal
from holdfast.node.admission.limits import AdmissionLimits, RateLimits
from holdfast.node.config import NodeConfig
from holdfast.node.node import Node

GATHER_MS: Final = 1
"""The default of `log.commit_gather_ms` for a node without others."""


def of_one(config: Config, node_id: str = "") -> Config:
    """The same configuration, with the settings of such a cluster. `node_id`: the id of the node if
    it is not that of this process."""
    cluster = replace(
        config.cluster,
        wait_for_init=False,
        replication_factor=1,
        min_insync=1,
        partitions=config.log.partitions,
        # Only a node that was removed may still be a peer of Raft here, and none can connect.
        start_alone_after_s=0.0,
    )
    return replace(config, cluster=cluster, node=replace(config.node, id=node_id or config.node.id))


def journal_waits(config: Config) -> JournalWaits:
    gather_ms = config.log.commit_gather_ms
    return JournalWaits(
        (GATHER_MS if gather_ms is None else gather_ms) / 1000,
        among_others=gather_ms is not None,
    )


def node_config(config: Config) -> NodeConfig:
    limits = config.limits
    return NodeConfig(
        node_id=config.node.id,
        partitions=(
            config.cluster.partitions if config.cluster.peer_bind else config.log.partitions
        ),
        memory_durability=config.log.durability == "memory",
        qos_max=limits.qos_max,
        retain_available=limits.retain_available,
        packet_bytes_max=limits.packet_bytes,
        keep_alive_s_max=limits.keep_alive_s_max,
        session_expiry_s_max=limits.session_expiry_s_max,
        receive_maximum=limits.receive_maximum,
        inflight_max=limits.inflight_max,
        topic_alias_max=limits.topic_alias_max,
        outgoing_topic_alias_max=limits.outgoing_topic_alias_max,
        outbox_messages=limits.outbox_messages,
        outbox_bytes=limits.outbox_bytes,
        retained_max=limits.retained_max,
        retained_bytes_max=limits.retained_bytes,
        wildcard_available=limits.wildcard_available,
        shared_available=limits.shared_available,
        replay_available=limits.replay_available,
        replay_bytes_per_s=limits.replay_bytes_per_s,
        replay_pin_bytes=limits.replay_pin_bytes,
        queues_max=limits.queues,
        delay_s_max=limits.delay_s,
        delayed_messages_max=limits.delayed_messages,
        delayed_messages_per_client=limits.delayed_messages_per_client,
        delayed_bytes_max=limits.delayed_bytes,
        pending_bytes_max=limits.pending_bytes_max,
        subscriptions_per_session=limits.subscriptions_per_session,
        filter_bytes_per_session=limits.filter_bytes_per_session,
        filter_bytes_max=limits.filter_bytes,
        sessions_max=limits.sessions,
        connections=limits.connections or descriptors.for_clients(),
        connect_bytes=limits.connect_bytes,
        pending_connect_bytes=limits.pending_connect_bytes,
        pending_connects_per_address=limits.pending_connects_per_address,
        client_id_bytes=limits.client_id_bytes,
        connect_timeout_s=limits.connect_timeout_s,
        allow_anonymous=bool(config.security.allow_anonymous),
        has_listener_rights=any(each.mount or each.acl_file for each in config.listeners),
        sys_interval_s=config.sys.interval_s,
        producers_max=limits.producers_max,
        producer_expiry_s=limits.producer_expiry_s,
        authenticates_users=authenticates_users(config),
        qos0_logged=list(config.log.qos0),
        admission=admission_limits(config),
    )


def admission_limits(config: Config) -> AdmissionLimits:
    """The rates, quotas and lock-out of the configuration."""
    rates, quotas, lockout = config.rates, config.quotas, config.lockout
    return AdmissionLimits(
        client=_scope_rates(rates.client),
        user=_scope_rates(rates.user),
        address=_scope_rates(rates.address),
        listener=_scope_rates(rates.listener),
        listeners={
            each.name: _listener_rates(each, rates.listener)
            for each in config.listeners
            if each.messages_per_s or each.bytes_per_s or each.connects_per_s
        },
        over=rates.over,
        burst_s=rates.burst_s,
        sessions_per_user=quotas.sessions_per_user,
        bytes_per_user=quotas.bytes_per_user,
        period_s=quotas.period_s,
        lockout_failures=lockout.failures,
        lockout_window_s=lockout.window_s,
        lockout_s=lockout.duration_s,
        lockout_scopes=list(lockout.scopes),
    )


def _listener_rates(own: Listener, common: schema.ScopeRates) -> RateLimits:
    return RateLimits(
        own.messages_per_s or common.messages_per_s,
        own.bytes_per_s or common.bytes_per_s,
        own.connects_per_s or common.connects_per_s,
    )


def _scope_rates(rates: schema.ScopeRates) -> RateLimits:
    return RateLimits(rates.messages_per_s, rates.bytes_per_s, rates.connects_per_s)


def new_node(config: Config, security: SecurityFiles, journal: Journal) -> Node:
    """Makes a node without recovered state. It may run in any thread."""
    node = Node(node_config(config), journal)
    state = node.state
    state.acl = security.acl
    security.apply_to(node)
    state.tracer = tracer_for(config.tracing, config.node.id)
    state.client_id_prefix = f"auto-{secrets.token_hex(8)}-"
    # The same clock as the loop's, which must not be used in another thread.
    node.tick(time.monotonic(), time.time_ns() // 1000)
    return node
