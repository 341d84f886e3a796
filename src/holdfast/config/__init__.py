"""Configuration: the settings (`schema`), their sources (`sources`), their errors (`values`,
`check`).

The file is read first, then the environment, then the command line; the later one wins. A mistake
gets one line with the key, the value and the allowed values.
"""
