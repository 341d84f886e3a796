"""The command `holdfast`: one module or folder for each subcommand, loaded when it is used."""
