"""Agrees on the retained messages of the whole federation: versions, and the newest one."""
