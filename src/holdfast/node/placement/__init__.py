"""Placement: the hash ring, the choice of leaders, and the controller that maintains both."""
