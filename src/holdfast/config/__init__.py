"""Configuration: what can be set (`schema`), how it is read (`load`), what is wrong (`check`).

The file is read first, then the environment, then the command line; the later one wins. A mistake
gets one line that names the key, the value and what is allowed.
"""
