"""A member of a federation at work: links, custody on disk, and the edge to its broker.

`federation` decides; what it wants done is done here, in the event loop, in its order. What may
block works in a thread.

- A message is confirmed to the broker (`done`) once it is in the store durably, or is nobody's.
- A position is stored after the edge is done with everything up to it, and confirmed to the origin
  after that: a crash between repeats messages, and loses none.
- What the edge was given and has not done is given to it again, in order, when it is up again.
- Whoever does not prove to belong to the federation learns nothing and costs a bounded amount.
- A manager that is away costs no message.
"""
