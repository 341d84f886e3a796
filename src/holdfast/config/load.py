"""Loads the configuration of a broker from its sources (`sources`)."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from holdfast.config.check import contradictions
from holdfast.config.check_identity import has_sources
from holdfast.config.check_listener import admits_anonymous
from holdfast.config.listener import LOOPBACK_ORIGINS, Listener
from holdfast.config.schema import Config
from holdfast.config.sources import Overrides, load_settings


def load(
    path: Path | None,
    environ: Mapping[str, str] | None = None,
    overrides: Overrides | None = None,
) -> Config:
    """The configuration with every default filled in. Raises `ConfigError`.

    `path` None: no file. `security.allow_anonymous` is resolved to true or false, and empty
    `allowed_origins` of a listener to `"loopback"` where `_resolve_origins` says so.
    """
    return load_settings(Config, contradictions, path, environ, overrides, complete=_resolve)


def _resolve(config: Config) -> Config:
    """Resolves what depends on other settings."""
    config = _resolve_anonymous(config)
    listeners = [_resolve_origins(each, config) for each in config.listeners]
    return msgspec.structs.replace(config, listeners=listeners)


def _resolve_origins(listener: Listener, config: Config) -> Listener:
    """Excludes the pages of other machines from a listener of this machine without authentication.
    Otherwise each page of the internet that a user visits could publish there. A browser reaches no
    Unix socket, and sends no header of a proxy."""
    is_reached = listener.is_loopback() and not listener.socket and not listener.proxies
    is_asked = (
        is_reached and not listener.require_certificate and admits_anonymous(listener, config)
    )
    if not is_asked or listener.transport != "websocket" or listener.allowed_origins:
        return listener
    return msgspec.structs.replace(listener, allowed_origins=[LOOPBACK_ORIGINS])


def _resolve_anonymous(config: Config) -> Config:
    """Resolves an unset `allow_anonymous`. As in Mosquitto 2, clients of other machines need a
    setting that lets them in without credentials."""
    security = config.security
    if security.allow_anonymous is not None:
        return config
    anonymous = all(listener.is_loopback() for listener in config.listeners) and not (
        security.password_file
        or security.scram_file
        or security.dynamic_security_file
        or has_sources(security)
        or any(listener.password_file or listener.psk_file for listener in config.listeners)
    )
    return msgspec.structs.replace(
        config, security=msgspec.structs.replace(security, allow_anonymous=anonymous)
    )
