"""A Mosquitto configuration in the terms of this broker.

A line without a counterpart, or with another meaning, becomes a note with its file and line. A line
that asks for what Holdfast does anyway needs none.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from holdfast.config.sources import read_file

DAY_S: Final = 86_400
UNITS_S: Final = {"h": 3600, "d": DAY_S, "w": 7 * DAY_S, "m": 30 * DAY_S, "y": 365 * DAY_S}
LEVELS: Final = {"debug": "debug", "all": "debug", "information": "info", "notice": "info"}
INCLUDES_MAX: Final = 100
"""The most files that are included, so that a file that includes itself ends."""

LISTENER_KEYS: Final = {
    "certfile": "certificate",
    "keyfile": "key",
    "cafile": "client_ca",
    "crlfile": "crl",
    "ciphers": "tls_ciphers",
}
TLS_VERSIONS: Final = {"tlsv1.1": "1.2", "tlsv1.2": "1.2", "tlsv1.3": "1.3"}
SECURITY_KEYS: Final = {"password_file": "password_file", "acl_file": "acl_file"}
LIMIT_KEYS: Final = {
    "max_inflight_messages": ("inflight_max", 65_535),
    "max_keepalive": ("keep_alive_s_max", 65_535),
    "max_packet_size": ("packet_bytes", 0),
    "message_size_limit": ("packet_bytes", 0),
    "max_topic_alias": ("topic_alias_max", 0),
    "max_qos": ("qos_max", 2),
}
"""The key of `limits`, and the value in place of Mosquitto's 0 for no limit; 0: 0 is kept out."""
LISTENER_LIMITS: Final = ("max_qos", "max_topic_alias")
"""The keys of `LIMIT_KEYS` that belong to a listener there."""
IGNORED: Final = frozenset(
    [
        "autosave_interval",
        "autosave_on_changes",
        "connection_messages",
        "log_facility",
        "log_timestamp",
        "log_timestamp_format",
        "persistence_file",
        "set_tcp_nodelay",
        "socket_domain",
        "upgrade_outgoing_qos",
        "websockets_log_level",
        "check_retain_source",
    ]
)
"""The keys that need no counterpart."""
DEFAULTS: Final = {
    "allow_zero_length_clientid": "true",
    "memory_limit": "0",
    "persistence": "true",
    "queue_qos0_messages": "false",
}
"""The keys that need no counterpart with this value."""
NOTES: Final = {
    "allow_zero_length_clientid": "a client without an id receives one",
    "auto_id_prefix": "Holdfast chooses its own prefix for client ids that are empty",
    "ciphers_tls1.3": "the ciphers of TLS 1.3 are fixed",
    "clientid_prefixes": "restrict clients by users and the ACL file",
    "enable_proxy_protocol": "name the addresses of the proxies in proxies of the listener",
    "dhparamfile": "TLS 1.2 uses elliptic curves only",
    "log_dest": "the log goes to standard error",
    "memory_limit": "each part of the memory has a limit of its own; see docs/limits.md",
    "max_queued_bytes": "the log keeps messages of sessions; see log.retention.session_bytes",
    "max_queued_messages": "the log keeps messages of sessions; see log.retention.session_bytes",
    "persistence": "the log is always on disk",
    "pid_file": "the service manager knows the process; no file is written",
    "persistence_location": "the data is in node.data; mosquitto.db is not imported",
    "queue_qos0_messages": "name the topics whose QoS 0 messages are kept in log.qos0",
    "user": "start the broker as that user",
    "use_subject_as_username": "the user is the common name of the certificate",
    "use_username_as_clientid": "a session belongs to its user",
}
"""The notes about keys that have no counterpart."""
BRIDGE_KEYS: Final = [
    "address",
    "addresses",
    "topic",
    "remote_",
    "local_",
    "bridge_",
    "cleansession",
    "keepalive_interval",
    "start_type",
    "restart_timeout",
    "round_robin",
    "try_private",
    "notifications",
    "idle_timeout",
    "threshold",
]
"""The beginnings of the keys of a bridge."""


@dataclass
class MosquittoImport:
    """The result. `tables` are those of the configuration file. `notes` has a line for each thing
    that could not be carried over."""

    tables: dict[str, dict[str, object]] = field(default_factory=dict)
    listeners: list[dict[str, object]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    users: Path | None = None
    """The file of the dynamic security plugin, which Holdfast reads and writes as Mosquitto
    does."""

    def toml(self) -> str:
        """The configuration file, with the notes on top."""
        lines = [f"# {note}" for note in self.notes]
        if lines:
            lines = ["# Differences to mosquitto.conf, by line:", *lines, ""]
        for name, table in self.tables.items():
            lines += [f"[{name}]", *_lines(table), ""]
        for listener in self.listeners:
            lines += ["[[listeners]]", *_lines(listener), ""]
        return "\n".join(lines)


def import_configuration(path: Path) -> MosquittoImport:
    """Reads a mosquitto.conf with the files that it includes. Raises `OSError`, and `ValueError`
    with the file and line of a value that is none."""
    reader = _Reader()
    reader.read(path)
    return reader.finish()


def _lines(table: dict[str, object]) -> list[str]:
    # JSON's texts, numbers and truth values are TOML's.
    return [f"{key} = {json.dumps(value)}" for key, value in table.items()]


class _Reader:
    """Reads line by line. Keys before the first `listener` are those of the default listener."""

    def __init__(self) -> None:
        self._made = MosquittoImport()
        self._listener: dict[str, object] = {}
        self._where = ""
        self._included = 0
        self._bridge = ""
        self._required: list[dict[str, object]] = []
        self._plugin = ""
        self._is_per_listener = False
        self._psk_file = ""
        # Notes that count only if there are several listeners.
        self._for_all: list[str] = []

    def read(self, path: Path) -> None:
        try:
            text = read_file(path)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 at byte {error.start + 1}") from None
        for number, line in enumerate(text.splitlines(), 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            key, _, value = line.partition(" ")
            self._where = f"{path}:{number}"
            self._take(key, value.strip())

    def finish(self) -> MosquittoImport:
        made = self._made
        if self._listener and self._listener not in made.listeners:
            made.listeners.insert(0, {"port": 1883, **self._listener})
        if len(made.listeners) > 1:
            made.notes += self._for_all
        for listener in made.listeners:
            if "psk_hint" in listener:
                # There the hint is the switch, and the identity is a user name only if the
                # configuration says so.
                listener.setdefault("psk_file", self._psk_file)
                listener.setdefault("certificate_user", "none")
            elif listener not in self._required:
                # Without require_certificate Mosquitto asks for no certificate.
                for key in ("client_ca", "crl", "certificate_user"):
                    listener.pop(key, None)
            elif "client_ca" in listener:
                # There a certificate is a user name only if the configuration says so.
                listener.setdefault("certificate_user", "none")
            if listener.get("certificate_user") == "cn":
                # There the certificate decides alone: the name and the password of CONNECT are
                # ignored, and a certificate without a name is refused.
                listener["authentication"] = ["certificate"]
                listener["allow_anonymous"] = False
        security = made.tables.setdefault("security", {})
        if made.listeners and "allow_anonymous" not in security:
            security["allow_anonymous"] = False
        made.tables = {name: table for name, table in made.tables.items() if table}
        return made

    def _take(self, key: str, value: str) -> None:
        if key == "listener":
            self._begin_listener(value)
        elif key == "include_dir":
            self._include(Path(value))
        elif key == "connection":
            self._bridge = value
            self._note(f"bridge {value}: use [federation] in place of it, or the bridge's own side")
        elif self._bridge and key.startswith(tuple(BRIDGE_KEYS)):
            return
        elif key in ("plugin", "auth_plugin"):
            self._plugin = value
            if "dynamic_security" not in value:
                self._note(f"plugin {value}: there are no plugins")
        elif key.startswith(("plugin_opt_", "auth_opt_")):
            if "dynamic_security" in self._plugin and key.endswith("config_file"):
                self._made.users = Path(value)
                security = self._made.tables.setdefault("security", {})
                security["dynamic_security_file"] = value
                if self._is_per_listener:
                    self._note("dynamic security is for all listeners without files of their own")
        elif not self._take_listener_key(key, value):
            self._take_global_key(key, value)

    def _begin_listener(self, value: str) -> None:
        port, _, address = value.partition(" ")
        if self._listener and self._listener not in self._made.listeners:
            self._made.listeners.append({"port": 1883, **self._listener})
        self._listener = {"port": self._number(port), "bind": address.strip() or "0.0.0.0"}
        if port == "0":
            self._listener = {"socket": address.strip(), "socket_mode": "0666"}
        self._made.listeners.append(self._listener)

    def _include(self, directory: Path) -> None:
        if not directory.is_dir():
            raise ValueError(f"{self._where}: there is no directory {directory}")
        self._note(
            f"include_dir {directory}: its files are read here, so a line below this one wins"
        )
        for path in sorted(directory.glob("*.conf")):
            self._included += 1
            if self._included > INCLUDES_MAX:
                raise ValueError(f"{self._where}: more than {INCLUDES_MAX} included files")
            self.read(path)

    def _take_listener_key(self, key: str, value: str) -> bool:
        listener = self._listener
        if key in LISTENER_KEYS:
            listener[LISTENER_KEYS[key]] = value
        elif key == "port":
            listener["port"] = self._number(value)
        elif key == "bind_address":
            listener["bind"] = value
        elif key == "max_connections":
            listener["max_connections"] = max(0, self._number(value))
        elif key == "protocol":
            if value == "websockets":
                listener["transport"] = "websocket"
                listener["path"] = "*"
            elif value != "mqtt":
                self._note(f"protocol {value} is not supported")
        elif key == "require_certificate":
            if self._truth(value):
                listener["require_certificate"] = True
                self._required.append(listener)
        elif key == "use_identity_as_username":
            listener["certificate_user"] = "cn" if self._truth(value) else "none"
        elif key == "mount_point":
            listener["mount"] = value if value.endswith("/") else f"{value}/"
            if not value.endswith("/"):
                self._note(f"the mount is {value}/: a prefix of topics ends with a slash")
        elif key == "tls_version":
            if value not in TLS_VERSIONS:
                raise ValueError(f"{self._where}: {value!r}: known are {', '.join(TLS_VERSIONS)}")
            listener["tls_minimum"] = TLS_VERSIONS[value]
        elif key == "allow_anonymous" and self._is_per_listener:
            listener["allow_anonymous"] = self._truth(value)
        elif key == "psk_hint":
            listener["psk_hint"] = value
        elif key == "psk_file" and self._is_per_listener:
            listener["psk_file"] = value
        elif key in SECURITY_KEYS and self._is_per_listener:
            listener[SECURITY_KEYS[key]] = value
        else:
            return False
        return True

    def _take_global_key(self, key: str, value: str) -> None:
        security = self._made.tables.setdefault("security", {})
        limits = self._made.tables.setdefault("limits", {})
        if key == "psk_file":
            self._psk_file = value
        elif key in SECURITY_KEYS:
            security[SECURITY_KEYS[key]] = value
        elif key == "allow_anonymous":
            security["allow_anonymous"] = self._truth(value)
        elif key in LIMIT_KEYS:
            name, unlimited = LIMIT_KEYS[key]
            number = self._number(value) or unlimited
            if number:
                limits[name] = number
            if key in LISTENER_LIMITS:
                self._for_all.append(
                    f"{self._where}: {key}: there it is for one listener, here for all"
                )
            if key == "message_size_limit":
                self._note("packet_bytes is the size of the whole packet, topic included")
        elif key == "retain_available":
            limits["retain_available"] = self._truth(value)
        elif key == "persistent_client_expiration":
            limits["session_expiry_s_max"] = self._duration(value)
        elif key == "sys_interval":
            self._made.tables.setdefault("sys", {})["interval_s"] = self._number(value)
        elif key == "log_type":
            if value in LEVELS:
                self._made.tables.setdefault("logging", {})["level"] = LEVELS[value]
        elif key == "per_listener_settings":
            self._is_per_listener = self._truth(value)
        elif key not in IGNORED and DEFAULTS.get(key) != value:
            self._note(f"{key}: {NOTES.get(key, 'there is no counterpart')}")

    def _note(self, text: str) -> None:
        self._made.notes.append(f"{self._where}: {text}")

    def _number(self, value: str) -> int:
        try:
            return int(value)
        except ValueError:
            raise ValueError(f"{self._where}: {value!r} is no whole number") from None

    def _truth(self, value: str) -> bool:
        if value not in ("true", "false"):
            raise ValueError(f"{self._where}: {value!r} is neither true nor false")
        return value == "true"

    def _duration(self, value: str) -> int:
        unit = UNITS_S.get(value[-1:], 0)
        if not unit:
            raise ValueError(f"{self._where}: {value!r}: a time is a number with h, d, w, m or y")
        return self._number(value[:-1]) * unit
