"""Replicated state: sessions, retained messages and producers, as the committed records say."""
