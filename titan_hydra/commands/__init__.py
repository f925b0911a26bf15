"""One file for each word of `titan`: `add_arguments` declares its options, `main` runs it and returns the exit
status.
"""
