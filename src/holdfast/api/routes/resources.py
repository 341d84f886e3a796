"""All endpoints of this package."""

from holdfast.api.access.bans import BanRoutes
from holdfast.api.access.may import MayRoutes
from holdfast.api.cluster.client_routes import ClientRoutes
from holdfast.api.cluster.figures import FigureRecorder
from holdfast.api.cluster.plan_routes import PlanRoutes
from holdfast.api.cluster.timeline_routes import TimelineRoutes
from holdfast.api.endpoints import Endpoint
from holdfast.api.log.node_figures import NodeFigureRoutes
from holdfast.api.log.one_record import OneRecordRoutes
from holdfast.api.log.record_counts import RecordCountRoutes
from holdfast.api.log.record_routes import RecordRoutes
from holdfast.api.log.session_history import SessionHistoryRoutes
from holdfast.api.nodes.fan_out import Everywhere
from holdfast.api.nodes.own_node import OwnNode
from holdfast.api.pipeline.routes import PipelineRoutes
from holdfast.api.routes.event_feed import EventFeed
from holdfast.api.routes.figure_routes import FigureRoutes
from holdfast.api.routes.group_routes import GroupRoutes
from holdfast.api.routes.live_routes import LiveRoutes
from holdfast.api.routes.message_routes import DelayedRoutes, MessageRoutes
from holdfast.api.routes.session_routes import SessionRoutes
from holdfast.api.routes.subscription_routes import SubscriptionRoutes
from holdfast.api.routes.topic_routes import TopicRoutes
from holdfast.api.routes.trace_routes import TraceRoutes


def resource_endpoints(
    node: OwnNode, everywhere: Everywhere, figures: FigureRecorder, clients: ClientRoutes
) -> list[Endpoint]:
    """The declarations of the endpoints, in the order of the documents."""
    return [
        *SessionRoutes(node, everywhere).endpoints(),
        *SessionHistoryRoutes(node, everywhere).endpoints(),
        *BanRoutes(node, everywhere).endpoints(),
        *MayRoutes(node, everywhere).endpoints(),
        *SubscriptionRoutes(node, everywhere).endpoints(),
        *MessageRoutes(node).endpoints(),
        *DelayedRoutes(node).endpoints(),
        *TopicRoutes(node).endpoints(),
        *RecordRoutes(node).endpoints(),
        *GroupRoutes(node).endpoints(),
        *PipelineRoutes(node, everywhere).endpoints(),
        *OneRecordRoutes(node).endpoints(),
        *RecordCountRoutes(node, everywhere).endpoints(),
        *NodeFigureRoutes(node, everywhere).endpoints(),
        *TraceRoutes(node).endpoints(),
        *LiveRoutes(node, everywhere).endpoints(),
        *FigureRoutes(node, everywhere).endpoints(),
        *EventFeed(node, everywhere).endpoints(),
        *PlanRoutes(node, everywhere).endpoints(),
        *clients.endpoints(),
        *TimelineRoutes(node, everywhere, figures).endpoints(),
    ]
