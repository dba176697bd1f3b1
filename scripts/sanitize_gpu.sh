#!/usr/bin/env bash
# The GPU tests under NVIDIA's compute-sanitizer: memcheck and initcheck of all kernels, racecheck of
# ours alone. Needs a GPU, and JAX with CUDA in PYTHON.
#
#   bash scripts/sanitize_gpu.sh LOGS                    all tests/gpu/test_*.py
#   bash scripts/sanitize_gpu.sh LOGS compression conv   only tests/gpu/test_{compression,conv}.py
#
# JOBS (3) run at once, and behind them one by one those that fill the card; each has LIMIT (500)
# seconds. TOOLS names fewer tools than memcheck, racecheck and initcheck. The summary has a line for
# each tool and file: what pytest and the sanitizer said at the end. Exits with a failure if a sanitizer
# reported anything or did not come to its end. Tests that look at a clock may fail, since kernels run
# many times slower.
set -uo pipefail
cd "$(dirname "$0")/.."
logs=$1
shift
mkdir -p "$logs"
export logs PYTHON=${PYTHON:-python3} LIMIT=${LIMIT:-500} XLA_PYTHON_CLIENT_PREALLOCATE=false
# autotuning would run each of XLA's kernels a hundred times
export XLA_FLAGS="${XLA_FLAGS:+$XLA_FLAGS }--xla_gpu_autotune_level=0"

# What each tool is asked. What is copied to the host whole, its unused rest with it, is no finding.
options_of() {
    case $1 in
    memcheck) echo "--report-api-errors no" ;;
    racecheck) echo "--kernel-name kernel_substring=vmem" ;;
    initcheck) echo "--check-api-memory-access no" ;; # of all kernels, to know what each has written
    esac
}

# one "TOOL FILE": its log is LOGS/TOOL_FILE.log; each has a directory of its own, since the tool's
# processes find each other by files there
one() {
    local tool=$1 file=$2 log=$logs/$1_$2.log own
    own=$(mktemp -d)
    # shellcheck disable=SC2046  # options are words
    TMPDIR=$own timeout "$LIMIT" compute-sanitizer --tool "$tool" \
        --target-processes application-only $(options_of "$tool") \
        "$PYTHON" -m pytest -q -s -p no:cacheprovider -m gpu "tests/gpu/test_$file.py" >"$log" 2>&1
    rm -rf "$own"
}
export -f one options_of

names=("$@")
if ((!${#names[@]})); then
    for path in tests/gpu/test_*.py; do
        path=${path##*/test_}
        names+=("${path%.py}")
    done
fi
for name in "${names[@]}"; do
    for tool in ${TOOLS:-memcheck racecheck initcheck}; do echo "$tool $name"; done
done >"$logs/jobs"
full='compression|memory_taken|steps_gpu|transfers'
grep -vE "$full" "$logs/jobs" | xargs -r -P "${JOBS:-3}" -L 1 bash -c 'one $0 $1'
grep -E "$full" "$logs/jobs" | xargs -r -P 1 -L 1 bash -c 'one $0 $1'

status=0
while read -r tool name; do
    log=$logs/${tool}_$name.log
    tests=$(grep -aE '^=*[ 0-9].*(passed|failed|skipped|error).* in [0-9.]+' "$log" | tail -n 1)
    found=$(grep -aoE '(ERROR|RACECHECK) SUMMARY: .*' "$log" | sort | uniq -c | tr -s ' ' | paste -sd ';')
    echo "$tool $name: ${tests:-no end};${found:- no summary}"
    grep -aqE '(ERROR|RACECHECK) SUMMARY: ' "$log" || status=1
    grep -aE '(ERROR|RACECHECK) SUMMARY: ' "$log" | grep -qvE 'SUMMARY: 0 ' && status=1
done <"$logs/jobs"
exit $status
