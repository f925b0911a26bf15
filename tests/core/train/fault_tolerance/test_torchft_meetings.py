"""Show why meetings do not use torchft: what its Local SGD loses if the lighthouse ends while a group waits for the
others. Then cause the same accident with the files of quorum.py.

A step adds 1 to the weight in group 0 and 16 in group 1, so that a weight shows whose steps are in it.
"""

import multiprocessing
import os
import signal
import socket
import subprocess
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Event

import pytest
import torch
import torch.distributed as dist

from titan_hydra.core.train.fault_tolerance.exchange import Peers
from titan_hydra.core.train.fault_tolerance.quorum import Board
from titan_hydra.core.train.world import open_store

LEARNS = (1.0, 16.0)  # what each group's weight gains in one step
SYNC_EVERY = 2
LIMIT = 60  # seconds
AWAY = 5  # seconds without a lighthouse: group 0 then tries to connect about every two seconds


class Lighthouse:
    """torchft's own lighthouse program, on a port that stays the same."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.start()

    def start(self) -> None:
        program = Path(sysconfig.get_path("scripts")) / "torchft_lighthouse"
        command = [str(program), f"--bind=[::]:{self.port}", "--min_replicas=1"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.005)
        raise TimeoutError("torchft_lighthouse does not answer")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class TorchftGroup:
    """A replica group of one rank with torchft's manager and its Local SGD."""

    def __init__(self, group: int, port: int) -> None:
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo

        self.group, self.model = group, torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.model.weight)
        self.taken: list[float] = []  # weights that this group has taken from the other
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.manager = Manager(
            ProcessGroupGloo(timedelta(seconds=LIMIT)),
            self.take,
            self.model.state_dict,
            min_replica_size=1,
            use_async_quorum=False,
            init_sync=False,
            quorum_retries=100,  # with 0, its default, the waiting group ends with an error
            timeout=timedelta(seconds=LIMIT),
            quorum_timeout=timedelta(seconds=LIMIT),
            connect_timeout=timedelta(seconds=LIMIT),
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self.store.port,
            hostname="127.0.0.1",
            replica_id=f"group_{group}",
            lighthouse_addr=f"http://127.0.0.1:{port}",
        )

    def take(self, state: dict[str, torch.Tensor]) -> None:
        self.taken.append(float(state["weight"]))
        self.model.load_state_dict(state)

    def train(self) -> float:
        """Take the steps up to a meeting, hold it, and return the weight."""
        from torchft.local_sgd import LocalSGD

        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        with LocalSGD(self.manager, self.model, optimizer, SYNC_EVERY):
            for _ in range(SYNC_EVERY):
                self.model.weight.grad = torch.full((1, 1), -LEARNS[self.group])
                optimizer.step()
        return self.model.weight.item()


@pytest.mark.slow
def test_torchft_meets_without_a_group_that_waits_and_raises_nothing():
    """Group 1 joins after a first meeting, as after a restart. The two groups hold one meeting, and the lighthouse ends
    in the next. Group 1 holds this next meeting alone, although group 0 waits in it. Then there are two possible ends.
    Either group 0 takes group 1's weights and loses its own last steps; or the groups cannot meet any more, because the
    new lighthouse gives out numbers of meetings a second time, and each group goes on with its own weights.
    """
    pytest.importorskip("torchft", reason="the extra torchft is not installed")
    lighthouse = Lighthouse()
    groups = [TorchftGroup(0, lighthouse.port)]
    try:
        with ThreadPoolExecutor(2) as pool:
            assert groups[0].train() == 2
            groups.append(TorchftGroup(1, lighthouse.port))
            joining = pool.submit(groups[1].train)
            time.sleep(1)  # otherwise the lighthouse does not wait for a group that is new
            assert (groups[0].train(), joining.result()) == (4, 4)
            waiting = pool.submit(groups[0].train)
            time.sleep(1)
            lighthouse.kill()
            time.sleep(AWAY)
            lighthouse.start()
            alone = groups[1].train()
            time.sleep(2 * AWAY)  # group 0 connects again; the lighthouse would not wait for it
            after = groups[1].train()
            assert alone == 4 + 2 * 16
            assert (waiting.result(), after) in [(4 + 4 * 16, 4 + 4 * 16), (4 + 2, 4 + 4 * 16)]
    finally:
        for group in groups:
            group.manager.shutdown(wait=False)
        lighthouse.kill()


def third_group(folder: Path) -> None:
    """Run a third group that has begun, and sends heartbeats but does nothing else, until it is killed."""
    Board(folder, 2, 3, AWAY, "127.0.0.1:0").begin((0, 0), LIMIT, lambda: False)
    time.sleep(LIMIT)


def meet(group: int, board: Board, position: tuple[int, int], weight: float) -> float:
    """Hold one meeting of quorum.py and exchange.py, as replicas.py does, and return the average."""
    meeting = board.convene(position, lambda: False)
    assert meeting is not None
    peers, vector = Peers(group, 0, LIMIT), torch.tensor([weight])
    peers.meet(meeting)
    peers.add_up(vector)
    assert meeting.takers == []
    assert board.settle(meeting, True)
    return vector.item() / len(meeting.donors)


@pytest.mark.slow
def test_with_files_no_process_is_needed_by_a_waiting_group(tmp_path):
    """No process acts as a lighthouse: the only other process is a third group, which is killed while group 0 waits."""
    third = multiprocessing.get_context("fork").Process(target=third_group, args=(tmp_path,))
    third.start()
    stores = [open_store("127.0.0.1", None, timedelta(seconds=LIMIT)) for _ in LEARNS]
    boards = [Board(tmp_path, group, 3, AWAY, f"127.0.0.1:{store.port}") for group, store in enumerate(stores)]
    try:
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(lambda board: board.begin((0, 0), LIMIT, lambda: False), boards)) == [False, False]
            started = Event()
            waiting = pool.submit(lambda: (started.set(), meet(0, boards[0], (0, 2), 2 * LEARNS[0]))[1])
            started.wait()
            time.sleep(1)
            os.kill(third.pid, signal.SIGKILL)
            time.sleep(AWAY)
            assert not waiting.done()
            assert meet(1, boards[1], (0, 2), 2 * LEARNS[1]) == waiting.result() == (2 * 1 + 2 * 16) / 2
    finally:
        third.kill()
        for board in boards:
            board.close()
