"""Outbound messages: subscriptions, live delivery, replay from the log, acknowledgements."""
