"""The graph that the manager wants: placement, repair, rebalancing, health. Pure."""
