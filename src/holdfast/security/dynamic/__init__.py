"""Users, groups and roles that clients change at run time, as Mosquitto's dynamic security does."""
