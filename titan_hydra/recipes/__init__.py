"""Ways of training beside plain text, each in a folder with its sources, objective, family, rules and commands. A
recipe registers its parts in the same way as a module of `train.imports`; deleting its folder removes the recipe
completely.
"""

# The configuration imports every recipe, and some recipes import others. Imported first, it causes no import cycle.
from titan_hydra.core.job import config as config
