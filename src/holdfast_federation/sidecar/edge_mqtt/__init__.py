"""Connects any MQTT broker: a client that publishes and subscribes."""
