"""Decodes the JSON of small files, such as the manifest."""

import json
from typing import Any


def decode_object(data: bytes) -> Any:
    """The object that the bytes contain. Raises `ValueError` for anything else, also for one that
    is nested too deeply to be read."""
    try:
        content = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("no object")
    return content
