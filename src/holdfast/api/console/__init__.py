"""The console: pages for people at `/console/` of the admin port. They use the admin API alone."""
