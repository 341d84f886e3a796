"""All endpoints of this package."""

from holdfast.api.endpoints import Endpoint
from holdfast.api.routes.everywhere import Everywhere
from holdfast.api.routes.own_node import OwnNode
from holdfast.api.routes.session_routes import SessionRoutes


def resource_endpoints(view: OwnNode, everywhere: Everywhere) -> list[Endpoint]:
    """The declarations of the endpoints, in the order of the documents."""
    return [*SessionRoutes(view, everywhere).endpoints()]
