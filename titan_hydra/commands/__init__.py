"""One file for each word of `titan`: `add_arguments` declares its options, `main` runs it and returns the exit status.
tune.py and calibrate.py are parts of `plan`, model.py is shared by the words that load a model.
"""
