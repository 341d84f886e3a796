"""HTTP for operators: which requests are answered, and bounds on their connections.

The broker's admin port, the federator's and the topology manager's use it. Whoever reaches such a
port need not prove anything there, so nothing that a stranger or a web page does may cost much.
"""
