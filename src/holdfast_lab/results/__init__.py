"""Results of experiments: stored as files, and shown as a page, as Markdown and as text.

`store` has the files of a run, `pages` the report.
"""
