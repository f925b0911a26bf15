"""The batch script of a job: it runs one cell after another, starts the ranks of each cell by srun, and requeues the
job if the ranks were asked to stop.

submitit makes the script's header from its parameters. Its pickles are not used: they are named after the job's id, so
a submitter killed just after sbatch would leave a job without its pickle. Here everything that a job needs is on disk
before sbatch: a list with a line (number, nodes, ranks, run directory, attempt, restarts) for each cell. A task of an
array runs its own line, a packed job all lines. Each replica group of a cell has its own line, with the group's run
folder in place of the run directory, so that SLURM can requeue a single group. The line of an elastic run has the
numbers of nodes and of ranks for each of the run's layouts. Each start takes the first layout that fits on the job's
nodes, and copies the layout's file layout_<nodes>.json to the run's config.json.

A job starts an attempt only if attempt.json has the submission's token. An attempt is started only once: the first job
that writes its id into the attempt's file `job` owns the attempt. A requeued job creates the next attempt; a job that
finds another token or another job's id starts nothing.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import SlurmExecutor

from titan_hydra.core.base.errors import Exit
from titan_hydra.core.job.run import layout
from titan_hydra.core.train.worker import LATE
from titan_hydra.experiments.launch.executors.queued import guarded_setup

from .keys import SlurmCluster

LIST = "cells.tsv"
LONGEST = 24 * 3600  # seconds between two checks for free nodes, at most, unless cluster.grow_minutes is longer
LOST_NODES = 3  # maximum number of requeues for the reason that ranks lost a node which SLURM still considered healthy
# Environment variables that would override #SBATCH lines of the script, and so the configuration.
OURS = {
    f"SBATCH_{name}"
    for name in ("JOB_NAME", "ARRAY_INX", "WAIT", "NO_REQUEUE", "REQUEUE", "SIGNAL", "OUTPUT", "ERROR", "EXPORT")
}
# flags of sbatch whose environment variable is not SBATCH_ and the flag's name, but SBATCH_ and this value
NAMED = {"time": "TIMELIMIT", "mem": "MEM_PER_NODE", "switches": "REQ_SWITCH"}

# The script's variable `job` cannot simply be SLURM_JOB_ID: for one of an array's tasks, SLURM_JOB_ID is the number of
# the whole array, and requeuing this number would requeue all tasks, even finished ones.
BODY = """
# `job` is this job's id, as scontrol takes it. `attempt` is the folder of the attempt that runs, `rc` the exit status of its ranks.
unset -f ls grep cat cp sed sort tail head rm mv mkdir xargs sleep date hostname id  # functions that the user's shell exports
job="${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}" job="${{job:-$SLURM_JOB_ID}}"
refuse() {{ echo "$(date +%T) $(hostname): $1; nothing is started"; }}
# Prints attempt.json of the next attempt. It is no copy of the last one, which may be damaged.
claim() {{
    cat <<END
{{
  "born": null,
  "cluster": "$SLURM_CLUSTER_NAME",
  "code": "{code}",
  "executor": "slurm",
  "here": false,
  "host": "$(hostname)",
  "index": ${{SLURM_ARRAY_TASK_ID:-0}},
  "job_id": "$job",
  "packed": {packed},
  "pid": $$,
  "started": $(date +%s),
  "token": "{token}",
  "user": "${{SLURM_JOB_USER:-$(id -un)}}"
}}
END
}}
# Sets `attempt` to the folder of the attempt that this start of the job owns. $1 run directory, $2 its attempt at submission.
own_attempt() {{
    local all="$1/attempts" mine="$1/attempts/.job-$job" tries=0 newest
    until [ -e "$all/$2/attempt.json" ]; do
        ls "$all" >/dev/null 2>&1  # an NFS client remembers for long that a file was not there; a listing asks again
        [ "$((tries += 1))" -le {late} ] || {{ refuse "$all/$2/attempt.json cannot be seen here"; return {unhealthy}; }}
        sleep 1
    done
    while :; do
        newest="$(ls "$all" | grep -xE '[1-9][0-9]*' | sort -n | tail -n 1)" attempt="$all/$newest"
        cat "$attempt"/attempt*.json | grep -q '^  "token": "{token}"' || {{ refuse "$attempt is not this job's"; return {config}; }}
        ! (set -C; echo "$job" >"$attempt/job") 2>/dev/null || return 0
        [ "$(cat "$attempt/job")" = "$job" ] || {{ refuse "$attempt is that of job $(cat "$attempt/job")"; return {config}; }}
        rm -rf "$mine"
        mkdir "$mine" || return
        claim >"$mine/attempt.json" && cp "$mine/attempt.json" "$mine/attempt_copy.json" \\
            && mv -T "$mine" "$all/$((newest + 1))" || [ -e "$all/$((newest + 1))" ] || return
    done
}}
# Prints the status of a rank that failed by itself, while srun asked the others to stop: from its record or, if it left none, from srun.
own_failure() {{
    {{
        grep -ls '"secondary": false' "$attempt"/rank_*.json | xargs -rd '\\n' grep -h '^  "exit_status": '
        grep -qs '"secondary": true' "$attempt"/rank_*.json || grep -oE 'Exited with exit code [0-9]+' "$attempt/job.log"
    }} | grep -oE '[0-9]+' | grep -vxE '0|75' | head -n 1
}}
# Whether a signal ended srun itself, as the kernel's does when memory is short: then srun has reported no rank that ended.
srun_was_killed() {{ [ "$rc" -gt 128 ] && [ "$rc" -lt 160 ] && ! grep -qE 'srun: error: \\S+: tasks? [0-9]' "$attempt/job.log"; }}
# Chooses the largest layout that fits on the job's nodes. Sets `nodes`, `ranks` and, if nodes stay idle, srun's option `place`.
# $1 the nodes of each layout, $2 their ranks, $3 run directory.
take_layout() {{
    local sizes counts hosts number error
    IFS=, read -ra sizes <<<"$1"; IFS=, read -ra counts <<<"$2"
    nodes="$1" ranks="$2" place=()
    [ "${{#sizes[@]}}" -gt 1 ] || return 0
    for number in "${{!sizes[@]}}"; do
        [ "${{sizes[number]}}" -gt "$SLURM_JOB_NUM_NODES" ] || break
    done
    nodes="${{sizes[number]}}" ranks="${{counts[number]}}"
    mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    echo "$(date +%T) $SLURM_JOB_NODELIST: layout of $nodes nodes, $ranks ranks; idle: ${{hosts[*]:nodes}}" >>"$attempt/job.log"
    [ "$nodes" = "${{#hosts[@]}}" ] || place=(--nodelist="$(IFS=,; echo "${{hosts[*]:0:nodes}}")")
    error="$({{ LC_ALL=C cp "$3/layout_$nodes.json" "$3/.config" && LC_ALL=C mv -T "$3/.config" "$3/config.json"; }} 2>&1)" && return
    rm -f "$3/.config"
    refuse "$3/config.json is not written: $error" | tee -a "$attempt/job.log"
    rc={unhealthy}
    ! grep -qiE 'no space|quota' <<<"$error" || rc={config}  # which every node would meet
    echo "$rc" >"$attempt/exit"  # without it, the script would seem to be killed
    return "$rc"
}}
# Asks the ranks to stop once enough nodes are free for a larger layout; the requeued job then takes it. SLURM's answer does not count
# the job's own nodes, so a limit on a user's nodes may still refuse nodes that the answer calls free. Therefore each attempt keeps in
# its file `growth` the seconds between its checks and, if it asked to grow, the nodes of its layout; after a request that brought no
# larger layout, the seconds double. $1 the nodes of each layout, $2 run directory.
grow() {{
    local size next=0 answer start before="${{attempt%/*}}/$((${{attempt##*/}} - 1))" seconds= had=
    trap 'kill $!' TERM
    [ "$(cat "$before/job" 2>/dev/null)" != "$job" ] || read -r seconds had 2>/dev/null <"$before/growth"
    [[ "$seconds $had" =~ ^[1-9][0-9]*\\ [0-9]*$ ]] || seconds={grow_seconds} had=
    [ "$nodes" -le "${{had:-$nodes}}" ] || seconds={grow_seconds}
    if [ "$nodes" -le "${{had:-0}}" ]; then
        [ "$((seconds *= 2))" -lt {longest} ] || seconds={longest}
        echo "$(date +%T) requeued to grow from $had nodes, and has $nodes: the next check is in $((seconds / 60)) minutes" \\
            >>"$attempt/job.log"
    fi
    echo "$seconds" >"$attempt/growth"
    if [ "$(growths)" -ge {max_requeues} ]; then
        echo "$(date +%T) requeued to grow {max_requeues} times: no more checks" >>"$attempt/job.log"
        return
    fi
    for size in ${{1//,/ }}; do [ "$size" -le "$nodes" ] || next=$((size - SLURM_JOB_NUM_NODES)); done
    unset $(compgen -e SLURM_ | grep -vx SLURM_CONF)  # sbatch would use this job's variables for the new one
    while [ "$next" -gt 0 ]; do
        sleep "$seconds" & wait $! || return
        answer="$(sbatch --test-only --nodes="$next" "$2/sbatch.sh" 2>&1)" start="$(grep -oE 'to start at \\S+' <<<"$answer")"
        if [ -z "$start" ]; then echo "$(date +%T) $next more nodes: $answer" >>"$attempt/job.log"; continue; fi
        [ "$(date -d "${{start##* }}" +%s)" -le "$(($(date +%s) + 5))" ] || continue
        echo "$(date +%T) $next more nodes are free: the run saves and is requeued" >>"$attempt/job.log"
        echo "$seconds $nodes" >"$attempt/growth"
        scancel --signal=USR2 "$job.0" && return
        echo "$seconds" >"$attempt/growth"
    done
}}
# Prints how many attempts of this job were stopped so that it could grow.
growths() {{
    local file
    for file in "${{attempt%/*}}"/*/growth; do
        [ "$(cat "${{file%/*}}/job" 2>/dev/null)" != "$job" ] || grep ' ' "$file"
    done | wc -l
}}
# Runs one line of the list, and returns the exit status of its ranks. A rank that fails takes the others along. What a rank prints is
# in rank_<r>.log; what srun prints, and a rank before it has opened its log, is in job.log.
# $1 the nodes of each layout, $2 their ranks, $3 run directory, $4 its attempt at submission.
run_cell() {{
    own_attempt "$3" "$4" && take_layout "$1" "$2" "$3" || return
    {watch}
    srun --nodes="$nodes" --ntasks="$ranks" --ntasks-per-node="$((ranks / nodes))" "${{place[@]}}" \\
        --kill-on-bad-exit=1 --wait=60 --unbuffered {srun} \\
        {python} -u -m titan_hydra.experiments.launch.executors.slurm.rank "$3" "${{attempt##*/}}" </dev/null >>"$attempt/job.log" 2>&1
    rc=$?
    [ -z "$watcher" ] || kill "$watcher" 2>/dev/null
    lost=0
    if [ "$rc" != 0 ] && grep -qsx agreed "$attempt/stopped"; then
        rc=75  # all ranks had agreed to stop and have saved, whatever ended them after that
    elif [[ $rc =~ ^(75|140|143)$ ]] || grep -qsx blocked "$attempt/stopped"; then
        rc="$(own_failure)" rc="${{rc:-75}}"  # asked to stop before training or in a step; a signal may come before Python handles it
    elif {{ grep -q 'Timed out waiting for job step to complete' "$attempt/job.log" || srun_was_killed; }} && [ -z "$(own_failure)" ]; then
        rc={unhealthy} lost={lost_nodes}  # ranks of a node do not answer, which SLURM notices only after SlurmdTimeout; or srun is gone
    elif [ "$rc" -gt 128 ]; then
        own="$(own_failure)" rc="${{own:-$rc}}"  # srun returns the largest status, that of a rank killed after the failed one
    fi
    echo "$rc" >"$attempt/exit"
    return "$rc"
}}
# Requeues the job, whose ranks were asked to stop or are to be started again, unless somebody has cancelled it or it was requeued
# {max_requeues} times already. Requeues to grow do not count.
requeue() {{
    [ ! -e "$attempt/cancelled" ] || return
    scontrol show job "$job" | grep -q JobState=RUNNING || return
    if [ "$((${{SLURM_RESTART_COUNT:-0}} - $(growths)))" -ge {max_requeues} ]; then : >"$attempt/requeues_spent"; return; fi
    scontrol requeue "$job" && sleep 300
}}
# Whether the ranks are started again after they failed with status $rc: those of a replica group are, and those that lost a node, but
# none after a fault of the configuration, and none more often than allowed. After a lost node, only the failures count that came after
# the attempt that made the farthest step, as a run of weeks may lose many nodes.
# $1 run directory, $2 its attempt at submission, $3 how often its ranks may be started again.
restarts() {{
    local number step deaths=0 stuck=0 far=0
    [ "$3" -gt 0 ] || [ "${{lost:-0}}" -gt 0 ] && [ "$rc" != 0 ] && [ "$rc" != {config} ] && [ -e "$attempt/exit" ] || return
    for ((number = $2; number <= ${{attempt##*/}}; number++)); do
        step="$(grep -soE '"step": [0-9]+' "$1/attempts/$number/status.json")" step="${{step##* }}"
        [ "${{step:-0}}" -le "$far" ] || far="$step" stuck=0
        ! grep -qsvx 75 "$1/attempts/$number/exit" || deaths=$((deaths + 1)) stuck=$((stuck + 1))
    done
    [ "$deaths" -le "$3" ] || [ "$stuck" -le "${{lost:-0}}" ]
}}
trap : TERM USR2  # this script waits for its ranks, which get the signal too
status=0 lost=0 watcher=
while IFS=$'\\t' read -r line sizes counts run first allowed <&3; do
    [ ! -e {folder}/over-"$line" ] || continue
    run_cell "$sizes" "$counts" "$run" "$first"
    rc=$?
    if [ "$rc" = 75 ] || restarts "$run" "$first" "$allowed"; then requeue; exit "$rc"; fi
    {done}
    [ "$rc" = 0 ] || [ "$status" != 0 ] || status=$rc
done 3< <({lines})
exit "$status"
"""


@dataclass(frozen=True)
class JobShape:
    """The resources of a job. Cells with the same resources share an array. If `fewest` is not None, a job may start on
    any number of nodes from `fewest` to `nodes`.
    """

    nodes: int
    ranks_per_node: int
    time_minutes: int | None
    fewest: int | None = None


@dataclass(frozen=True)
class JobLine:
    """A line of a job's list: one cell, or one replica group of a cell. `sizes` has the numbers of nodes and of ranks
    of each layout of the cell, the largest layout first.
    """

    sizes: list[tuple[int, int]]
    directory: Path
    attempt: int
    restarts: int = 0  # how often this replica group may be started again after a failure


class SubmissionError(Exception):
    """sbatch refused the job; the exception's message is what sbatch printed."""


class SlurmBatch(SlurmExecutor):
    """What one call of sbatch submits: a job with a single line, an array with a task for each line or, if `packed`,
    one job that runs all lines one after another on the same nodes.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        shape: JobShape,
        lines: list[JobLine],
        cluster: SlurmCluster,
        paths: list[Path],
        packed: bool,
        at_once: int = 0,
    ) -> None:
        """Set sbatch's parameters; at most `at_once` lines of an array run at the same time (0: all)."""
        super().__init__(folder, python=cluster.python or shlex.quote(sys.executable))
        self.token, self.lines, self.cluster, self.paths = name.rpartition("-")[2], lines, cluster, paths
        self.packed, self.array = packed, len(lines) > 1 and not packed
        settings = {
            "job_name": name,
            "nodes": f"{shape.fewest}-{shape.nodes}" if shape.fewest else shape.nodes,
            "ntasks_per_node": shape.ranks_per_node,
            "gpus_per_node": shape.ranks_per_node,
            "cpus_per_task": cluster.cpus_per_task,
            **(one_task_a_node(shape, cluster) if shape.fewest else {}),
            "time": shape.time_minutes,
            "partition": cluster.partition,
            "account": cluster.account,
            "qos": cluster.qos,
            "constraint": cluster.constraint,
            "comment": cluster.comment,
            "exclude": ",".join(cluster.exclude) or None,
            "signal_delay_s": cluster.warning_seconds(shape.time_minutes),
            "use_srun": False,
            "stderr_to_stdout": True,
            "setup": self.setup(shape),
        }
        self.update_parameters(**{key: value for key, value in settings.items() if value is not None})
        self.parameters["additional_parameters"] = self.flags(shape, cluster)
        if self.array:
            self.parameters |= {"map_count": len(lines), "array_parallelism": at_once or len(lines)}

    @classmethod
    def affinity(cls) -> int:
        """Tell submitit that SLURM is available, even if it is not, so that launch.mode=dry works without SLURM."""
        return 1

    def flags(self, shape: JobShape, cluster: SlurmCluster) -> dict[str, Any]:
        """Return the flags of sbatch that submitit does not know, or that it would set to other values."""
        pattern = "%A_%a" if self.array else "%j"
        # Each % in the path is doubled; otherwise SLURM would replace a %j in the path by the job's id.
        log = str(self.folder).replace("%", "%%") + f"/{pattern}.log"
        return {
            "output": log,
            "requeue": True,
            "reservation": cluster.reservation,
            "wckey": None,
            "time": shape.time_minutes,
            **{key.replace("-", "_"): value for key, value in cluster.sbatch.items()},
        }

    def setup(self, shape: JobShape) -> list[str]:
        """Return the shell lines that the batch script runs before its ranks start."""
        paths = f"{':'.join(shlex.quote(str(path)) for path in self.paths)}${{PYTHONPATH:+:$PYTHONPATH}}"
        cores = self.cluster.cpus_per_task
        return [
            # The ranks get this script's environment, even if the site submits scripts with --export=NONE.
            f"unset SRUN_EXPORT_ENV SRUN_CPUS_PER_TASK{' SLURM_CPUS_PER_TASK' if shape.fewest else ''}",
            f"export SLURM_EXPORT_ENV=ALL PYTHONPATH={paths} PYTHONSAFEPATH=1",
            # srun before SLURM 22.05 reads the second variable, in which an elastic job has the cores of a whole node
            *([f"export SRUN_CPUS_PER_TASK={cores} SLURM_CPUS_PER_TASK={cores}"] if cores else []),
            *(f"export {name}={shlex.quote(value)}" for name, value in self.cluster.environment.items()),
            *guarded_setup(self.cluster.setup),
        ]

    @property
    def text(self) -> str:
        """The whole batch script."""
        return self._make_submission_file_text(self.body(), "")

    def body(self) -> str:
        """Return the part of the script that runs the cells."""
        folder = shlex.quote(str(self.folder))
        every = f"cat {folder}/{LIST}"
        minutes = self.cluster.grow_minutes
        return BODY.format(
            token=self.token,
            code=self.paths[0].name,
            packed=str(self.packed).lower(),
            late=LATE,
            unhealthy=int(Exit.UNHEALTHY),
            config=int(Exit.CONFIG),
            lost_nodes=LOST_NODES,
            srun=shlex.join(self.cluster.srun),
            python=self.python,
            max_requeues=self.cluster.max_requeues,
            grow_seconds=60 * (minutes or 0),
            longest=max(LONGEST, 60 * (minutes or 0)),
            watch='grow "$1" "$3" & watcher=$!' if minutes else ":",
            folder=folder,
            lines=f'sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {folder}/{LIST}' if self.array else every,
            done=":" if self.array or len(self.lines) == 1 else f'echo "$rc" >{folder}/over-"$line"',
        )

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        text = super()._make_submission_file_text(command, uid)
        unset = ("=None", "=False")  # the ends of lines that submitit writes for flags without a value
        return "\n".join(line for line in text.split("\n") if not (line.startswith("#SBATCH") and line.endswith(unset)))

    def write(self) -> None:
        """Write the list of lines and the batch script."""
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        rows = [
            f"{number}\t{joined(nodes for nodes, _ in line.sizes)}\t{joined(ranks for _, ranks in line.sizes)}"
            f"\t{line.directory}\t{line.attempt}\t{line.restarts}\n"
            for number, line in enumerate(self.lines)
        ]
        (folder / LIST).write_text("".join(rows))
        layout.SBATCH.of(folder).write_text(self.text)

    def submit_all(self) -> tuple[list[str], str]:
        """Call sbatch. Return the job id of each line (123_0, 123_1, ... in an array, else 123), and the name of the
        cluster if a flag of sbatch has chosen one.

        Raises SubmissionError.
        """
        # If this process runs in a SLURM job, sbatch would also use the variables of that job for the new job.
        foreign = {name for name in os.environ if name.startswith("SLURM_") and name != "SLURM_CONF"}
        flags = re.findall(r"^#SBATCH --([\w-]+)", self.text, re.M)
        set_here = {f"SBATCH_{NAMED.get(flag, flag.upper().replace('-', '_'))}" for flag in flags}
        environment = {name: value for name, value in os.environ.items() if name not in foreign | set_here | OURS}
        try:
            command = ["sbatch", "--parsable", str(layout.SBATCH.of(Path(self.folder)))]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=120)
        except subprocess.CalledProcessError as error:
            raise SubmissionError(
                " ".join(error.stderr.split()) or f"sbatch ended with status {error.returncode}"
            ) from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SubmissionError(f"sbatch: {error}") from error
        number, _, cluster = done.stdout.strip().partition(";")
        return [f"{number}_{index}" if self.array else number for index in range(len(self.lines))], cluster


def one_task_a_node(shape: JobShape, cluster: SlurmCluster) -> dict[str, Any]:
    """Return the settings of a job that may have any number of nodes in a range. With --ntasks-per-node, SLURM would
    compute the number of tasks from the smallest number of nodes, and give no more nodes than these tasks need. So the
    job has only one task per node; srun starts all ranks of a node in spite of this.
    """
    return {"ntasks_per_node": None, "cpus_per_task": shape.ranks_per_node * (cluster.cpus_per_task or 1)}


def joined(numbers: Iterable[int]) -> str:
    """Return numbers as the batch script reads them, separated by commas."""
    return ",".join(map(str, numbers))
