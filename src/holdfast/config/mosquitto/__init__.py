"""A Mosquitto configuration in the terms of this broker."""
