"""Compose every cell of this command line with Hydra; check, place and start them together. `python launch.py --help` lists the keys."""
import os
import sys

import hydra
from hydra.core.hydra_config import HydraConfig

from titan_hydra.config import compose_quickly, explain, register_schema
from titan_hydra.config.sweep import expand
from titan_hydra.launch.dispatch import dispatch, refuse_launcher

cells, faults = [], []


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def compose(config):
    cells.extend(expand(config, list(HydraConfig.get().overrides.task), faults))  # nothing starts before all cells are known to be good


def main() -> int:
    """Returns the exit status: a mistake on the command line is one line and 2; HYDRA_FULL_ERROR=1 shows Hydra's traceback."""
    refuse_launcher(sys.argv[1:])
    full_error = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints the error itself and exits 1
    register_schema()
    compose_quickly()
    try:
        compose()
    except Exception as error:
        if full_error or not (line := explain(error, sys.argv[1:])):
            raise
        print(line, file=sys.stderr)
        return 2
    if faults:
        print(*dict.fromkeys(faults), sep="\n", file=sys.stderr)
        return 2
    return dispatch(cells)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # while composing; nothing has started yet
        sys.exit(130)
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        sys.stderr.close()
