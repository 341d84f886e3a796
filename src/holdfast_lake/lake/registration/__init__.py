"""Registration of a lake's tables in catalogs, so that other programs find them by name."""
