"""Rights about which a service decides, one topic at a time."""
