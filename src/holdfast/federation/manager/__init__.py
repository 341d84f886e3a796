"""The topology manager of a federation: who is a member, and who is linked to whom.

Members ask once to join, are told their neighbours, and reconcile with what is desired from then
on; no message of theirs goes through the manager, and while it is down only joins and repairs wait.

Invariants of the desired links, after every change:

1. With three members or more they are connected, and stay so when any one member fails: every
   member has two neighbours or more, and there is no articulation point.
2. No member has more neighbours than its limit. A pinned link is there, a forbidden one is not.
3. An id is given once, and a member keeps its id for as long as it is a member.
4. A change is stored as a whole, with a revision of its own, before anybody is told of it.

`graph`, `placement`, `repair`, `rebalance`, `health`, `reports` and `desired` are pure. `store`
keeps the state in a database, and `changes` has one change after another stored and then seen.
`manager` puts them together for who asks, `rounds` for what is done unasked. `api` is the HTTP
form, `access` says who may ask what.
"""
