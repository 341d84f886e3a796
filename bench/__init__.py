"""What Holdfast costs and how fast it is, beside Mosquitto in the same run: `python -m bench`.

The broker runs alone in its process and only that process is measured. One generator process
plays all clients of a scenario: raw sockets, MQTT 3.1.1, frames of one fixed size, so that a
read of a thousand messages is checked and answered with a few slice operations. The generator
bounds what is under way, so no broker has a reason to drop a QoS 0 message, and a run in which
a message is missing is reported as failed whatever its figures.
"""
