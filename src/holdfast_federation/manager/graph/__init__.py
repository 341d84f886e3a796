"""Plans the desired graph of members: placement, repair, rebalancing and health. Pure."""
