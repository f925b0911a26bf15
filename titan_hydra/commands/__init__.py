"""One file for each subcommand of `titan`: `add_arguments` declares its options, `main` runs it and returns the exit
status. tune.py and calibrate.py belong to `titan plan`; the subcommands that load a model share model.py.
"""
