"""The federator: the part of a broker, or the process beside it, that makes it a member.

`holdfast_federation.core` decides and performs no input or output. This package carries out its
effects in the event loop, in their order. Blocking work runs in threads. It has the links, the
custody on disk and the edge to the broker.

- A message is confirmed to the broker (`done`) once it is stored durably or has no destination.
- A position is stored after the edge has finished every message below it. The origin receives its
  confirmation after that. A crash in between repeats messages and loses none.
- Messages that the edge received and did not finish are given to it again, in order, when it is up
  again.
- A peer that does not prove that it belongs to the federation learns nothing, and costs a bounded
  amount of memory and time.
- No message depends on the manager: while it is unreachable, members keep their links.
"""
