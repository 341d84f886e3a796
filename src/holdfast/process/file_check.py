"""Checks every file that the start of a broker opens."""

import os
import time
from pathlib import Path

from holdfast.api.census import dates_of, ended
from holdfast.config.problem import shown
from holdfast.config.schema import Config
from holdfast.io.peers.authentication import PeerAuth
from holdfast.io.settings.security_files import (
    SecurityFileError,
    admin_context,
    expired_list,
    load_listener,
    load_security,
)
from holdfast.security.access.access_file import AccessError, AccessFile, read_given
from holdfast.security.peer_secret import SecretError
from holdfast.security.tls import TlsError


def file_problems(config: Config) -> list[str]:
    """The files that a start would open and that cannot be used."""
    found: list[str] = []
    try:
        load_security(config)
    except SecurityFileError as error:
        found.append(str(error))
    for listener in config.listeners:
        try:
            if text := expired_list(listener, load_listener(listener)):
                found.append(text)
        except SecurityFileError as error:
            found.append(str(error))
        folder = Path(listener.socket).parent
        if listener.socket and not os.access(folder, os.W_OK | os.X_OK):
            found.append(f"listeners: the directory {folder} of a Unix socket cannot be written")
    try:
        admin_context(config.admin)
    except SecurityFileError as error:
        found.append(str(error))
    for credentials in (config.cluster, config.federation):
        if credentials is not None:
            try:
                PeerAuth.load(credentials)
            except (SecretError, TlsError) as error:
                found.append(str(error))
    found += ended(dates_of(config), time.time())
    data = Path(config.node.data)
    try:
        AccessFile(data).read()
        read_given(config.admin.access_file)
    except AccessError as error:
        found.append(str(error))
    place = next(each for each in (data, *data.absolute().parents) if each.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        found.append(f"node.data = {shown(config.node.data)}: {place} cannot be written")
    return found
