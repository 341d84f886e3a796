"""The command `holdfast`: one module or folder per subcommand, imported when it is used.

- It decides options, texts and exit codes. A request to a running node goes through its admin port,
  and an offline command reads the data directory.
- It never imports what the chosen subcommand does not use, so that `--help` and completion are
  fast.
- Invariant: an error of the user is one line on stderr that says what is wrong and what is allowed.
"""
