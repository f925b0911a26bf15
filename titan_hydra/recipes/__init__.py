"""Ways of training beside plain text, each in a folder with its sources, objective, family, rules and commands. A
recipe registers its parts in the same way as a module of `train.imports`; deleting its folder removes the recipe
completely.
"""

# The configuration comes first: it imports all recipes in its order, and some of them import others.
from titan_hydra.core.job import config as config
