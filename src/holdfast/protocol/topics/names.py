"""Topic names and topic filters: their validity, and the match of a filter with a name.

Names and filters are compared code point by code point, never normalised [MQTT-4.7.3-4]; a byte
order mark is a character like any other [MQTT-1.5.4-3].
"""

from typing import Final

LEVELS_MAX: Final = 200
"""The most levels of a name or filter. It bounds the work and the memory that one can cause.
Mosquitto's limit is the same."""
TOPIC_BYTES_MAX: Final = 65535
"""The most bytes of a name or filter in UTF-8."""
SHARE_PREFIX: Final = "$share/"
QUEUE_PREFIX: Final = "$queue/"
QUEUE_SHARE: Final = "$share/$queue/"
"""The beginning of the keys of queues. `$queue/filter` is short for the group `$queue`."""
"""The beginning of the filter of a shared subscription."""
_SHOWN_MAX: Final = 80


class InvalidTopic(ValueError):
    """An invalid topic name. The text has the reason and fits a reason string."""


class InvalidFilter(ValueError):
    """An invalid topic filter. The text has the reason and fits a reason string."""


def _shown(text: str) -> str:
    return repr(text) if len(text) <= _SHOWN_MAX else repr(text[:_SHOWN_MAX]) + "..."


def decode_topic(raw: bytes) -> str:
    """The topic name that a client sent. An invalid one raises `InvalidTopic`."""
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
    """Raises `InvalidFilter` unless this is a valid filter, shared or not."""
    # [MQTT-4.7.3-3] The limit is in bytes. A character has at most four, so most filters need no
    # encoding.
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
    """Checks a plain filter. `whole` is the filter as the client sent it, for the text of the
    error."""
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
    """Whether the filter is that of a shared subscription."""
    return filter.startswith(SHARE_PREFIX)


def is_delayed_filter(filter: str) -> bool:
    """Whether a filter, shared or not, is about `$delayed`, whose messages wait for their time."""
    if "$delayed" not in filter:
        return False
    plain = filter.split("/", 2)[2] if is_shared(filter) and filter.count("/") > 1 else filter
    return plain.split("/", 1)[0] == "$delayed"


def is_queue(filter: str) -> bool:
    """Whether the filter, or key of a group, is that of a queue."""
    return filter.startswith(QUEUE_SHARE)


def queue_key(filter: str) -> str:
    """`$share/$queue/filter` for `$queue/filter`, any other filter as it is."""
    if filter.startswith(QUEUE_PREFIX):
        return QUEUE_SHARE + filter[len(QUEUE_PREFIX) :]
    return filter


def split_shared(filter: str) -> tuple[str, str]:
    """Group name and plain filter of `$share/group/filter`. Another form raises `InvalidFilter`."""
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


def mounted_filter(mount: str, filter: str) -> str:
    """The filter with a prefix in front of its topics. An invalid filter stays as it is."""
    filter = queue_key(filter)
    try:
        check_filter(filter)
    except InvalidFilter:
        return filter
    if not is_shared(filter):
        return mount + filter
    group, plain = split_shared(filter)
    return f"{SHARE_PREFIX}{group}/{mount}{plain}"


def has_wildcard(filter: str) -> bool:
    """Whether the filter contains a wildcard."""
    return "+" in filter or "#" in filter


def matches(filter: str, topic: str) -> bool:
    """Whether a valid plain filter matches a valid name. The cost is the length of the shorter
    one."""
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


def covers(wide: str, narrow: str) -> bool:
    """Whether a valid plain filter matches each name that another one matches, level by level: a
    wildcard is covered by one at its place. A name is a filter, too."""
    if narrow.startswith("$") and wide[0] in "+#":
        return False  # [MQTT-4.7.2-1]
    levels = narrow.split("/")
    count = len(levels)
    index = 0
    for level in wide.split("/"):
        if level == "#":
            return True
        if index >= count or levels[index] == "#" or level not in ("+", levels[index]):
            return False
        index += 1
    return index == count


def levels_match(filter_levels: list[str], topic_levels: list[str], start: int) -> bool:
    """Whether the levels from `start` on match, without the rule about `$`. The levels before are
    known to match."""
    count = len(topic_levels)
    index = start
    for level in filter_levels[start:]:
        if level == "#":
            return True
        if index >= count or (level != "+" and level != topic_levels[index]):
            return False
        index += 1
    return index == count
