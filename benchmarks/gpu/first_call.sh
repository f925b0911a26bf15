#!/usr/bin/env bash
# What to run first on a machine with a CUDA device: first what is right, then what is fast.
#
#     bash benchmarks/gpu/first_call.sh correct 390            facts, kernels at 8B's widths, the main recipe, tests/gpu
#     bash benchmarks/gpu/first_call.sh speed 290              rows beside TorchTitan (lists/first.yaml)
#     bash benchmarks/gpu/first_call.sh again 100 speed 190    the cases that failed (again.jsonl is their tests.jsonl), then rows
#
# A number is how many seconds its word may take; the words run one after another. `carry` brings this file, the tree and the wheels to
# a machine without network. CPU=1 makes the call a rehearsal on a CPU. Results come as they are measured, into at most 8 files of $OUT.
set -uo pipefail
TREE=$(cd "$(dirname "$0")/../.." && pwd)
CARRIED=$(dirname "$TREE")  # has wheels/ beside the tree, if `carry` made it
OUT=$(realpath -m "${OUT:-first_call}")
export OUT PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo  # without a name service, gloo would wait for the address of the host's name
ON=(--device "${CPU:+cpu}" ${CPU:+--dry-run})
ON[1]=${ON[1]:-cuda}
SCRATCH=$(mktemp -d)
CARD=$SCRATCH/card.json
SLOWER=${CPU:+8}  # a CPU may take as many times longer
UNTIL=0  # second, counted from the start, at which the present word must have ended
STATUS=0
trap 'rm -rf "$SCRATCH"' EXIT

say() { printf '\n== %4d s  %s\n' "$SECONDS" "$*"; }

# Print the seconds until $1 before the end of the word, at most $2.
left() {
    local seconds=$((UNTIL - SECONDS - $1)) most=$((${2:-3600} * ${SLOWER:-1}))
    echo $((seconds < most ? seconds : most))
}

# Run a command within $1 seconds and the time of the word. A failure does not stop what follows.
step() {
    local seconds name=$2
    seconds=$(left 0 "$1")
    shift 2
    say "$name"
    [ "$seconds" -gt 0 ] || { echo "no time is left"; STATUS=1; return; }
    timeout --kill-after=5 "$seconds" "$@" || { echo "$name: exit status $?"; STATUS=1; }
}

install() {
    [ -d "$CARRIED/wheels" ] || return
    if [ ! -d "$CARRIED/site" ]; then
        say "install"
        for wheel in "$CARRIED"/wheels/*.whl; do
            python3 -m zipfile -e "$wheel" "$CARRIED/site.part" || exit 1
        done
        mv "$CARRIED/site.part" "$CARRIED/site"
    fi
    export PYTHONPATH=$CARRIED/site
}

facts() {
    say "facts"
    { python3 -V; timeout 30 nvidia-smi -L; ls /dev/nvidia[0-9]*; nproc; free -g; df -h /tmp /dev/shm; hostname; cat /etc/hosts; ulimit -n; } 2>&1
    timeout 90 python3 benchmarks/gpu/card.py "${ON[1]}" > "$CARD" || exit 1  # nothing can be measured here
    cat "$CARD"
}

correct() {
    step 90 "kernels at 8B's widths" python3 benchmarks/gpu/wide_kernels.py "${ON[1]}"
    step 240 "main recipe" python3 benchmarks/gpu/profile_rows.py recipe "${ON[@]}" --card "$CARD" --out "$OUT" \
        --seconds "$(left 5 230)" --row-seconds "$(left 5 120)"
    step 3600 "tests" python3 tests/gpu/run.py --shards "${ON[@]}" --card "$CARD" --out "$OUT" --seconds "$(left 45)"
}

again() {
    step 3600 "failed cases" python3 tests/gpu/run.py --shards --again "$CARRIED/again.jsonl" "${ON[@]}" --card "$CARD" --out "$OUT" \
        --seconds "$(left 45)"
}

speed() {
    step 3600 "speed" python3 benchmarks/gpu/run.py first "${ON[@]}" --card "$CARD" --out "$OUT" \
        --seconds "$(left 5)" --row-seconds "$(left 5 100)"
}

main() {
    cd "$TREE" || exit 1
    install
    facts
    while [ $# -gt 1 ]; do
        UNTIL=$((UNTIL + $2))
        "$1"
        shift 2
    done
    say "end"
    return $STATUS
}

[[ "$* " =~ ^((correct|again|speed)\ [1-9][0-9]*\ )+$ ]] || { sed -n 2,10p "$0" >&2; exit 2; }
mkdir -p "$OUT"
main "$@" 2>&1 | tee -a "$OUT/call.log"
