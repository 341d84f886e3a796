"""Sources of identity beside the files: tokens, an HTTP check, hooks."""
