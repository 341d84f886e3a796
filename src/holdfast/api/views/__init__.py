"""Views: what the routes of the admin port read from the broker's state.

Invariant: no view holds a turn of the event loop above SLICE_S of `slices`. A long one is a
generator that yields after every few items.
"""
