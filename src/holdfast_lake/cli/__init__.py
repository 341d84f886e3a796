"""`holdfast pipeline`: the tables of a lake, kept up to date by Spark."""
