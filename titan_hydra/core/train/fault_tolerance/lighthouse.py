"""torchft's lighthouse for one attempt, as a separate process. The lighthouse reports to the replica groups which of
them are alive, and it ends when its parent process ends.

    python -m titan_hydra.core.train.fault_tolerance.lighthouse ADDRESS_FILE SILENT_SECONDS
"""

import sys
from pathlib import Path

from torchft.coordination import LighthouseServer

from titan_hydra.core.job.config.files import write_text

# milliseconds that a quorum waits for a live group that has not arrived; the group may be validating, or be slow
DAY = 24 * 60 * 60 * 1000


def serve_lighthouse(address: str, silent: float) -> LighthouseServer:
    """Serve on an address. A group that has sent no heartbeat for `silent` seconds is dropped."""
    return LighthouseServer(bind=address, min_replicas=1, heartbeat_timeout_ms=int(1000 * silent), join_timeout_ms=DAY)


def main() -> None:
    """Serve on a free port of this machine, and write the address to a file. After a restart, serve on the same port,
    which the file contains.
    """
    path, silent = Path(sys.argv[1]), float(sys.argv[2])
    port = path.read_text().rpartition(":")[2] if path.exists() else "0"
    server = serve_lighthouse(f"127.0.0.1:{port}", silent)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, f"http://127.0.0.1:{server.address().rpartition(':')[2]}", durable=False)
    sys.stdin.read()  # the read returns when the parent process ends


if __name__ == "__main__":
    main()
