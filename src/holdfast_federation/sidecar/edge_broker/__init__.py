"""The edge inside a Holdfast broker: the session `$federation` of its node."""
