"""The edge to any MQTT broker: a client beside it that publishes and subscribes."""
