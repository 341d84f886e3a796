"""A member of the published protocol at work: a client of its own broker and its neighbours'."""
