"""Topic names and topic filters: what is valid, and which filter matches which name.

Names and filters are compared code point by code point, never normalised [MQTT-4.7.3-4]; a byte
order mark is a character like any other [MQTT-1.5.4-3].
"""

from typing import Final

LEVELS_MAX: Final = 200
"""More levels than this are refused in names and filters. Mosquitto's limit is the same; it
bounds the work and the memory that one name or filter can cause."""
TOPIC_BYTES_MAX: Final = 65535
SHARE_PREFIX: Final = "$share/"
_SHOWN_MAX: Final = 80


class InvalidTopic(ValueError):
    """Not a topic name. The text says why and fits a reason string."""


class InvalidFilter(ValueError):
    """Not a topic filter. The text says why and fits a reason string."""


def _shown(text: str) -> str:
    return repr(text) if len(text) <= _SHOWN_MAX else repr(text[:_SHOWN_MAX]) + "..."


def decode_topic(raw: bytes) -> str:
    """The topic name that a client sent. Raises InvalidTopic."""
    # [MQTT-4.7.3-1]
    if not raw:
        raise InvalidTopic("a topic name has at least one character")
    # [MQTT-4.7.3-3]
    if len(raw) > TOPIC_BYTES_MAX:
        raise InvalidTopic(f"a topic name of {len(raw)} bytes, the maximum is {TOPIC_BYTES_MAX}")
    try:
        # The strict decoder refuses surrogates and overlong forms. [MQTT-1.5.4-1]
        topic = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidTopic(
            f"a topic name that is not UTF-8: {error.reason} at byte {error.start}"
        ) from None
    # [MQTT-4.7.0-1] [MQTT-3.3.2-2]
    if "+" in topic or "#" in topic:
        raise InvalidTopic(f"wildcards are for filters, not for the topic name {_shown(topic)}")
    # [MQTT-4.7.3-2] [MQTT-1.5.4-2]
    if "\0" in topic:
        raise InvalidTopic(f"U+0000 in the topic name {_shown(topic)}")
    if topic.count("/") >= LEVELS_MAX:
        raise InvalidTopic(
            f"a topic name of {topic.count('/') + 1} levels, the maximum is {LEVELS_MAX}"
        )
    return topic


def check_filter(filter: str) -> None:
    """Raise InvalidFilter unless this is a valid filter, shared or not."""
    # [MQTT-4.7.3-3] counted in bytes; four a character at most, so most need no counting
    if len(filter) > TOPIC_BYTES_MAX // 4 and len(filter.encode()) > TOPIC_BYTES_MAX:
        raise InvalidFilter(
            f"a filter of {len(filter.encode())} bytes, the maximum is {TOPIC_BYTES_MAX}"
        )
    # [MQTT-4.7.3-2] [MQTT-1.5.4-2]
    if "\0" in filter:
        raise InvalidFilter(f"U+0000 in the filter {_shown(filter)}")
    if is_shared(filter):
        split_shared(filter)
    else:
        _check_levels(filter, filter)


def _check_levels(filter: str, whole: str) -> None:
    """`whole`: what the client sent, for the text of the error."""
    # [MQTT-4.7.3-1]
    if not filter:
        raise InvalidFilter("a filter has at least one character")
    separators = filter.count("/")
    if separators >= LEVELS_MAX:
        raise InvalidFilter(f"a filter of {separators + 1} levels, the maximum is {LEVELS_MAX}")
    if "#" in filter:
        # [MQTT-4.7.1-1]
        if filter.index("#") != len(filter) - 1:
            raise InvalidFilter(f"'#' must be the last character of the filter {_shown(whole)}")
        if filter != "#" and not filter.endswith("/#"):
            raise InvalidFilter(f"'#' must be a level of its own in the filter {_shown(whole)}")
    if "+" in filter:
        # [MQTT-4.7.1-2]
        for level in filter.split("/"):
            if "+" in level and level != "+":
                raise InvalidFilter(f"'+' must be a level of its own in the filter {_shown(whole)}")


def is_shared(filter: str) -> bool:
    return filter.startswith(SHARE_PREFIX)


def split_shared(filter: str) -> tuple[str, str]:
    """Group name and plain filter of `$share/group/filter`. Raises InvalidFilter."""
    # [MQTT-4.8.2-1] [MQTT-4.8.2-2]
    end = filter.find("/", len(SHARE_PREFIX))
    if not is_shared(filter) or end < 0:
        raise InvalidFilter(
            f"a shared subscription is '$share/group/filter', found {_shown(filter)}"
        )
    group = filter[len(SHARE_PREFIX) : end]
    if not group:
        raise InvalidFilter(f"the group name is empty in {_shown(filter)}")
    if "+" in group or "#" in group:
        raise InvalidFilter(f"a group name may not contain '+' or '#', found {_shown(filter)}")
    plain = filter[end + 1 :]
    if not plain:
        raise InvalidFilter(f"there is no filter after the group name in {_shown(filter)}")
    _check_levels(plain, filter)
    return group, plain


def has_wildcard(filter: str) -> bool:
    return "+" in filter or "#" in filter


def matches(filter: str, topic: str) -> bool:
    """Does a valid plain filter match a valid name? Costs the length of the shorter one."""
    if filter == topic:
        return True
    if "+" not in filter:
        if not filter.endswith("#"):
            return False
        if len(filter) == 1:
            return not topic.startswith("$")  # [MQTT-4.7.2-1]
        # `a/#` matches `a` and everything below `a/`.
        return topic.startswith(filter[:-1]) or topic == filter[:-2]
    # [MQTT-4.7.2-1]
    if filter.startswith("+") and topic.startswith("$"):
        return False
    return levels_match(filter.split("/"), topic.split("/"), 0)


def levels_match(filter_levels: list[str], topic_levels: list[str], start: int) -> bool:
    """matches() from level `start` on, without the rule about `$`; the ones before are equal."""
    count = len(topic_levels)
    index = start
    for level in filter_levels[start:]:
        if level == "#":
            return True
        if index >= count or (level != "+" and level != topic_levels[index]):
            return False
        index += 1
    return index == count
