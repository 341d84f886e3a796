"""Admission: rates, quotas and bans, which decide how much a client may do, and whether at all."""
