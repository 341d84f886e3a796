"""The checks of rows before they are committed."""
