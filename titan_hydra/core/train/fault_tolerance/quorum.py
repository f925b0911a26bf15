"""Rendezvous of replica groups through files, without a server. The files show which groups are alive, which groups
take part in a meeting, and whether the meeting counts.

No server can die; if a group dies, the remaining groups continue with the files. Each group shows that it is alive in
heart_<group>.json. Meetings are numbered folders. A group that has arrived writes present_<group>.json. The first group
that sees that all live groups have arrived closes the meeting with members.json. Members exchange their data and write
done_<group>.json, and outcome.json records whether the meeting counts.

members.json and outcome.json are created with link(2): if several processes try, exactly one succeeds, on NFS too. So
all groups read the same decision, even if the process that made it dies immediately afterwards.
tests/core/train/fault_tolerance/test_torchft_meetings.py shows which of these properties torchft's quorum lacks.
"""

import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from titan_hydra.core.base.threads import thread
from titan_hydra.core.job.config.files import read_json, write_text

POLL = 0.05  # seconds between two reads of the files
KEPT = 8  # number of meetings whose files are kept


@dataclass(frozen=True)
class Meeting:
    """A closed meeting: its member groups, the donors (the members with the newest weights), the donors' step, and the
    address of the store.
    """

    number: int
    members: dict[int, str]  # group -> id of the group's present start (`Board.life`)
    donors: list[int]
    step: int
    address: str

    @property
    def takers(self) -> list[int]:
        """The members with an older state, which take the state of the donors."""
        return sorted(set(self.members) - set(self.donors))


class Board:
    """A replica group's view of the other groups, and the group's own heartbeat. Each group has one process with a
    board.
    """

    def __init__(self, folder: Path, group: int, groups: int, timeout: float, address: str) -> None:
        """Join the other groups in `folder`, and begin to beat in a thread. `timeout` is the seconds after which a
        group whose heartbeat does not change counts as lost.
        """
        self.folder, self.group, self.groups, self.timeout, self.address = folder, group, groups, timeout, address
        self.life = uuid.uuid4().hex
        self.phase = "starting"  # the phases that follow are "joining" or "training" and, at the end, "left"
        self.position = (0, 0)  # step of the last meeting, and the step that this group has reached
        self.number = max(self._numbers(), default=1)  # number of the next meeting
        self.beats = 0
        # group -> (the group's last heartbeat, the time by this process's clock at which the heartbeat changed)
        self.hearts: dict[int, tuple[dict, float]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self.lock, self.ended = threading.Lock(), threading.Event()
        self.beat()
        self.thread = thread(self._live, "heart")
        self.thread.start()

    # --- hearts -------------------------------------------------------------------------------------------------------

    def beat(self) -> None:
        """Write this group's heartbeat, and read the heartbeats of all groups."""
        with self.lock:
            self.beats += 1
            heart = {"life": self.life, "beat": self.beats, "phase": self.phase, "position": self.position}
            write_text(self.folder / f"heart_{self.group}.json", json.dumps(heart), durable=False)
            for group in range(self.groups):
                seen = read_json(self.folder / f"heart_{group}.json")
                if seen is not None and self.hearts.get(group, (None,))[0] != seen:
                    self.hearts[group] = (seen, time.monotonic())

    def become(self, phase: str, position: tuple[int, int]) -> None:
        """Publish this group's phase and position immediately."""
        self.phase, self.position = phase, position
        self.beat()

    def close(self) -> None:
        """Publish that this group has left, so that no group waits for its heartbeat."""
        self.ended.set()
        self.thread.join()
        self.become("left", self.position)

    def _live(self) -> None:
        while not self.ended.wait(min(1.0, self.timeout / 10)):
            try:
                self.beat()
            # the disk may be full; other groups may treat this group as dead until a later write succeeds
            except OSError:
                continue

    def alive(self, group: int) -> bool:
        """Whether a group's heartbeat has changed within the time-out."""
        heart, changed = self.hearts.get(group, ({}, 0.0))
        return heart.get("phase", "left") != "left" and time.monotonic() - changed < self.timeout

    def phases(self) -> dict[int, str]:
        """Return the phases of the live groups."""
        return {group: self.hearts[group][0]["phase"] for group in range(self.groups) if self.alive(group)}

    # --- the start of a group -----------------------------------------------------------------------------------------

    def begin(self, position: tuple[int, int], limit: float, stop: Callable[[], bool]) -> bool:
        """Wait until all groups are ready, or until a meeting that counts shows that training has already begun. Return
        whether another group is ahead of this group.
        """
        self.become("training", position)
        deadline = time.monotonic() + limit
        while not stop() and time.monotonic() < deadline:
            outcomes = filter(None, map(read_json, self.folder.glob("*/outcome.json")))
            newest = max([-1, *(outcome["step"] for outcome in outcomes if outcome["counts"])])
            ready = [group for group, phase in self.phases().items() if phase != "starting"]
            if newest >= 0 or len(ready) == self.groups:
                lasts = [self.hearts[group][0]["position"][0] for group in ready]
                behind = position[0] < max([newest, *lasts])
                self.become("joining" if behind else "training", position)
                return behind
            time.sleep(POLL)
        return False

    # --- meetings -----------------------------------------------------------------------------------------------------

    def convene(self, position: tuple[int, int], stop: Callable[[], bool]) -> Meeting | None:
        """Arrive at the next meeting, wait until it is closed with this group in it, and return the meeting. Return
        None if this group is asked to stop before the meeting is closed.
        """
        self.become(self.phase, position)
        while True:
            meeting_folder = self.folder / str(self.number)
            if not meeting_folder.exists():
                # if this group was suspended, old meetings may have been deleted
                self.number = max([self.number, *self._numbers()])
                meeting_folder = self.folder / str(self.number)
            if (closed := read_json(meeting_folder / "members.json")) is not None:
                meeting = Meeting(
                    self.number,
                    {int(group): life for group, life in closed["members"].items()},
                    closed["donors"],
                    closed["step"],
                    closed["address"],
                )
                self.number += 1
                if meeting.members.get(self.group) == self.life:
                    return meeting
                continue  # the meeting was closed without this group
            present = meeting_folder / f"present_{self.group}.json"
            if stop():
                present.unlink(missing_ok=True)
                return None
            if (read_json(present) or {}).get("life") != self.life:
                meeting_folder.mkdir(exist_ok=True)
                write_text(
                    present,
                    json.dumps({"life": self.life, "position": position, "address": self.address}),
                    durable=False,
                )
            self._close_if_all_are_there(meeting_folder)
            time.sleep(POLL)

    def _close_if_all_are_there(self, meeting_folder: Path) -> None:
        """Close the meeting if all live groups have arrived. A group that is behind also waits for groups that are
        still starting; other groups do not.
        """
        here = {}
        for group, phase in self.phases().items():
            arrival = read_json(meeting_folder / f"present_{group}.json")
            if arrival is not None and arrival["life"] == self.hearts[group][0]["life"]:
                here[group] = arrival
            elif phase == "training" or (phase == "starting" and self.phase == "joining"):
                return
        if self.group not in here:
            return
        newest = max(arrival["position"] for arrival in here.values())
        donors = [group for group, arrival in here.items() if arrival["position"] == newest]
        once(
            meeting_folder / "members.json",
            {
                "members": {group: arrival["life"] for group, arrival in here.items()},
                "donors": donors,
                "step": newest[1],
                "address": here[donors[0]]["address"],
            },
        )

    def settle(self, meeting: Meeting, went_well: bool) -> bool:
        """Publish whether the exchange succeeded in this group, and return the outcome once all members have published
        theirs. A meeting counts if the exchange succeeded for every member.
        """
        meeting_folder = self.folder / str(meeting.number)
        if not meeting_folder.exists():
            return False  # this group was suspended; meanwhile, the other groups have continued and deleted the folder
        write_text(meeting_folder / f"done_{self.group}.json", json.dumps({"well": went_well}), durable=False)
        while (outcome := read_json(meeting_folder / "outcome.json")) is None:
            done = {group: read_json(meeting_folder / f"done_{group}.json") for group in meeting.members}
            lost = [
                group
                for group, life in meeting.members.items()
                if done[group] is None and not (self.alive(group) and self.hearts[group][0]["life"] == life)
            ]
            failed = lost or not all(report["well"] for report in done.values() if report)
            if failed or None not in done.values():
                once(meeting_folder / "outcome.json", {"counts": not failed, "step": meeting.step})
            time.sleep(POLL / 5)
        if self.group == meeting.donors[0]:
            shutil.rmtree(self.folder / str(meeting.number - KEPT), ignore_errors=True)
        return outcome["counts"]

    def _numbers(self) -> list[int]:
        return [
            int(meeting_folder.name) for meeting_folder in self.folder.glob("[0-9]*") if meeting_folder.name.isdecimal()
        ]


def once(path: Path, content: dict) -> None:
    """Create a file unless it exists; a later call changes nothing."""
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    scratch.write_text(json.dumps(content), encoding="utf-8")
    try:
        os.link(scratch, path)
    except FileExistsError:
        pass
    finally:
        scratch.unlink()
