"""The publish queue: messages reach the broker in order, with the effect of once, at QoS 1.

    from holdfast.client import PublishQueue, SqliteStore

`core` selects the next message to send, `store` and `sqlite` keep the messages.
`queue.PublishQueue` drives both over a client. `reorder` and `ordered` are the subscriber's side.
"""
