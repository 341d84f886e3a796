"""HTML report of a lake: charts of its gold tables."""
