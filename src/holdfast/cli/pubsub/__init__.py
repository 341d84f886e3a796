"""`holdfast pub` and `holdfast sub`, with the options of Mosquitto's clients."""
