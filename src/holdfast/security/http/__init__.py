"""HTTP for operators: the requests that are accepted, and limits for their connections.

The broker's admin port, the federator's and the topology manager's use it. A client of such a port
need not prove its identity, so no request of a stranger or a web page may cost much.
"""
