"""Manages a federation: decides which brokers are members and which members are linked.

A member joins once and receives its neighbours. From then on it reports its links and follows the
desired ones. No message of a client passes through the manager. While it is down, joins and repairs
wait and everything else continues.

Invariants of the desired links, after every change:

1. Three or more members stay connected when any one of them fails: each has at least two
   neighbours, and there is no articulation point.
2. No member has more neighbours than its limit. A pinned link exists, a forbidden one does not.
3. An id is given once, and a member keeps its id for as long as it is a member.
4. A change is stored as a whole, with a revision of its own, before any member receives it.

`graph` and `state.federation_state` are pure. `state.store` keeps the state in a database, and
`state.changes` stores one change after the other. `manager` handles requests, `maintenance` works
without one. `api` is the HTTP form, and `access` checks the rights of callers.
"""
