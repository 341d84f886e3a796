"""Will of a session. MQTT 5.0, section 3.1.2.5."""


class Will:
    """A message that the broker publishes if the connection ends without DISCONNECT."""

    def __init__(
        self,
        topic: bytes,
        payload: bytes,
        qos: int,
        retain: bool,
        properties: bytes,
        expiry_s: int,
        delay_s: int,
    ) -> None:
        self.topic = topic
        self.payload = payload
        self.qos = qos
        self.retain = retain
        self.properties = properties
        self.expiry_s = expiry_s
        self.delay_s = delay_s
