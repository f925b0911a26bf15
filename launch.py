"""Compose every cell of this command line with Hydra; check, place and start them together. `python launch.py --help`
lists the keys.
"""

from titan_hydra.experiments.launch.main import launch_script

if __name__ == "__main__":
    launch_script(__file__)
