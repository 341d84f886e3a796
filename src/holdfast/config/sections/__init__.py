"""Sections of the configuration that are apart from `holdfast.config.schema`."""
