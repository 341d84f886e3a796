"""The replicated state: sessions, retained messages and producers as the committed records define
them."""
