"""Sends clients to other nodes.

- Decides: which clients leave, and when.
- Never: where they go; `node/relocation/redirection.py` decides that.
"""
