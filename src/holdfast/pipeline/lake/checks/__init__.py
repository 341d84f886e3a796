"""Checks rows before they are committed."""
