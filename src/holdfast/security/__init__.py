"""Who a client is and what it may do: password and ACL files in Mosquitto's formats, enhanced
authentication with SCRAM-SHA-256, TLS contexts.

Files are read when they are loaded; after that nothing here does I/O.
"""
