"""Configuration: what can be set (`schema`), how it is read (`load`), what it must fulfil
(`check`)."""
