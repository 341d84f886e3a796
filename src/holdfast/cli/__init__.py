"""The command `holdfast`: one module or folder per subcommand, imported when it is used."""
