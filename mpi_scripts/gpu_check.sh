#!/bin/sh
# Checks RingPrune on a machine with an NVIDIA GPU:  PYTHON=python3.12 mpi_scripts/gpu_check.sh [folder for results]
# Without PYTHON it is .venv's, where there is one, otherwise python3.
#
# Needs a Python with torch built for CUDA, setuptools >= 77, numpy and numba, and nvcc. What else is missing is said in
# one line, and what needs it is skipped: ninja, pytest and hypothesis (tests), compute-sanitizer. Neither Horovod, MPI
# nor a network is needed. The extension is built in a copy that is deleted afterwards. A table comes last. At most 8
# minutes.
#
# Exit status: 0 all that ran is well; 1 something failed; 3 no torch with CUDA or no GPU, nothing was checked.

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd) || exit 1
case "${1:-}" in -h | --help)
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac
python="${PYTHON:-python3}"
[ -n "${PYTHON:-}" ] || [ ! -x "$root/.venv/bin/python" ] || python="$root/.venv/bin/python"
"$python" "$root/mpi_scripts/gpu_check.py" device
status=$?
[ "$status" -eq 0 ] || exit "$status"

case "$python" in # it is called from another folder
*/*) python=$(CDPATH='' cd -- "$(dirname -- "$python")" && pwd)/$(basename -- "$python") || exit 1 ;;
esac
begin=$(date +%s)
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM
results="${1:-$root/build/gpu_check}"
mkdir -p "$results" || exit 1
results=$(CDPATH='' cd -- "$results" && pwd)
table="$scratch/table"
failures="$scratch/failures"
: >"$table"

# record NAME RESULT [SECONDS]
record() {
    printf '  %-34s %-8s %6s\n' "$1" "$2" "${3:-}" >>"$table"
    case "$2 $1" in
    ok* | skipped* | "too slow compute-sanitizer"*) ;; # which may take any time, and has then found nothing
    *) echo "$1" >>"$failures" ;;
    esac
}

# step NAME SECONDS COMMAND...: runs it for at most so long, and no longer than 8 minutes after the start
step() {
    name=$1
    limit=$2
    shift 2
    from=$(date +%s)
    left=$((begin + 470 - from))
    [ "$left" -gt 5 ] || { record "$name" "no time"; return 1; }
    [ "$limit" -lt "$left" ] || limit=$left
    echo "== $name"
    timeout -s INT -k 5 "$limit" "$@" # the benchmark then tells what it has
    case $? in
    0) result=ok ;;
    124 | 137) result="too slow" ;;
    *) result=FAILED ;;
    esac
    record "$name" "$result" "$(($(date +%s) - from)) s"
    [ "$result" = ok ]
}

# beside NAME SECONDS COMMAND...: the same beside others, until `all_done`, which shows what they printed
beside() {
    log="$scratch/beside-$(echo "$1" | tr -c 'a-z\n' _)"
    (step "$@" >"$log" 2>&1) &
}
all_done() {
    wait
    for log in "$scratch"/beside-*; do
        [ ! -e "$log" ] || cat "$log"
    done
}

# skip NAME REASON
skip() {
    echo "gpu check: $1 skipped: $2"
    record "$1" skipped
}

has() { "$python" -c "import $1" 2>/dev/null; }

cd "$root" || exit 1
cp -R setup.py pyproject.toml README.md LICENSE csrc ringprune tests mpi_scripts examples "$scratch" || exit 1
cd "$scratch" || exit 1
rm -f ringprune/_native*.so
export PYTHONPATH="$scratch${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1

# Only for the GPU that is here: the other architectures are compiled by `make lint`.
TORCH_CUDA_ARCH_LIST=$("$python" -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())')
export TORCH_CUDA_ARCH_LIST
case "$python" in # ninja lies beside it, and torch calls it from PATH
*/*) PATH="$(dirname -- "$python"):$PATH" ;;
esac
command -v ninja >/dev/null || echo "gpu check: no ninja, so the sources are compiled one by one"
if ! "$python" -W ignore mpi_scripts/gpu_check.py packages; then
    record build FAILED
elif step build 300 env RINGPRUNE_BUILD=cuda RINGPRUNE_NATIVE=off "$python" -W ignore setup.py -q build_ext --inplace; then
    export RINGPRUNE_NATIVE=require
    step "same bits as on the CPU" 90 "$python" mpi_scripts/gpu_check.py ops
    step "training on two simulated ranks" 60 "$python" mpi_scripts/gpu_check.py train
    step "copies through pinned memory" 60 "$python" mpi_scripts/gpu_check.py copies
    step "bench select" 120 "$python" -m ringprune bench select --device cuda --json "$results/select.json"
    # From here on nothing is timed.
    if has pytest && has hypothesis; then
        # without the project's settings, which ask for plugins
        set -- "$python" -m pytest -q -c /dev/null --rootdir=. --import-mode=importlib -p no:cacheprovider -W ignore
        beside "tests of the ops [cuda]" 180 "$@" -k "cuda and not native and not reference and not emulation" tests/ops
        beside "tests of training [cuda]" 180 "$@" -k "[cuda or -cuda" tests/test_cuda_training.py tests/test_cuda_streams.py \
            tests/test_residual.py tests/test_devices.py tests/wire/test_maps.py
    else
        skip "tests [cuda]" "pytest or hypothesis is not installed"
    fi
    sanitizer=$(command -v compute-sanitizer || ls "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer" 2>/dev/null)
    for tool in memcheck racecheck; do
        if [ -n "$sanitizer" ]; then
            # without torch's cache every allocation has ends of its own
            beside "compute-sanitizer $tool" 180 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool "$tool" \
                --kernel-name kernel_substring=ringprune --report-api-errors no --error-exitcode 9 \
                "$python" mpi_scripts/gpu_check.py ops --small
        else
            skip "compute-sanitizer $tool" "compute-sanitizer is neither on PATH nor in CUDA_HOME"
        fi
    done
    all_done
fi

echo
echo "GPU check, $(($(date +%s) - begin)) s; numbers of the benchmark are in $results"
cat "$table"
[ ! -e "$failures" ]
