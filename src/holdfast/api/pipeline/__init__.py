"""Status of data pipelines, as their jobs report it."""
