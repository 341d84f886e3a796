"""`holdfast bench`: a load at a fixed rate for any MQTT broker, and its latencies."""
