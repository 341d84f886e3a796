"""The PROXY protocol: the header by which a proxy passes on the address of its client.

Pure: no sockets. Source: "The PROXY protocol, versions 1 & 2" of HAProxy (2020/03/05).
"""
