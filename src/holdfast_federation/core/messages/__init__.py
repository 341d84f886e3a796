"""Messages between members: custody at the origin, forwarding, streams at the destination."""
