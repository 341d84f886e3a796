"""Import: files of the past, and the retained messages of another broker, become messages."""
