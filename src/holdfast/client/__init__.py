"""MQTT client library: a pure protocol core and its asyncio driver.

`holdfast.client.aio.Client` is what applications use; `protocol.ClientProtocol` is the core
without sockets and clock. Callers import the modules.
"""
