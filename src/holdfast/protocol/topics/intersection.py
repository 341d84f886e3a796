"""Intersects topic filters."""


def intersection(one: str, other: str) -> str | None:
    """Returns the filter that matches what both match, `$` topics aside, or None."""
    left = one.split("/")
    right = other.split("/")
    common: list[str] = []
    for index in range(max(len(left), len(right)) + 1):
        # `#` also matches its parent level, so it may follow where the other filter has ended.
        if left[index : index + 1] == ["#"]:
            return "/".join([*common, *right[index:]])
        if right[index : index + 1] == ["#"]:
            return "/".join([*common, *left[index:]])
        if index >= len(left) or index >= len(right):
            break
        if left[index] == "+":
            common.append(right[index])
        elif right[index] in ("+", left[index]):
            common.append(left[index])
        else:
            return None
    return "/".join(common) if len(left) == len(right) else None


def has_common_topic(one: str, other: str) -> bool:
    """Whether a topic can match both filters."""
    if one.startswith("$") != other.startswith("$"):
        return False  # [MQTT-4.7.2-1]
    return intersection(one, other) is not None
