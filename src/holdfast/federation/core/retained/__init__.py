"""The retained messages of the whole federation: versions, and agreement on the newest one."""
