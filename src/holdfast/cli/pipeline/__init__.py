"""`holdfast pipeline`: the tables of a lake, made and kept up to date by Spark."""
