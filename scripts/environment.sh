# Sourced by the other scripts: find_python, install_into and make_environment. POSIX sh.

# Images of containers forbid Python to keep bytecode. Every process of the tests would then compile all
# of JAX again: an import takes 5 s in place of 1.5 s.
unset PYTHONDONTWRITEBYTECODE

# Prints the path of a Python 3.11 or newer: $PYTHON if that is set, else the first on the PATH.
find_python() {
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "vmem_jax needs Python 3.11 or newer; set PYTHON to one. Tried: ${PYTHON:-python3 ...}" >&2
    return 1
}

# install_into DIR ARGUMENT...: `pip install ARGUMENT...` in that environment. uv takes half of pip's time,
# and unpacks each wheel once for all environments; where it cannot, as with an index that only pip's
# configuration names, pip does it.
install_into() {
    into=$1
    shift
    "$into/bin/uv" pip install --quiet --python "$into/bin/python" "$@" ||
        "$into/bin/python" -W ignore -m pip install --quiet --no-compile --disable-pip-version-check "$@"
}

# make_environment DIR ARGUMENT...: a virtual environment in DIR with what `pip install ARGUMENT...`
# installs. Reused as it is while the arguments, what is built and the Python stay the same.
make_environment() {
    directory=$1
    shift
    python=$(find_python) || return 1
    wanted="$("$python" -V) $* $(cat pyproject.toml CMakeLists.txt xla_ffi/*.h xla_ffi/*.cc | cksum)"
    if [ "$(cat "$directory/.installed" 2>/dev/null)" = "$wanted" ]; then
        return 0
    fi
    echo "== setting up $directory with $("$python" -V): pip install $*"
    rm -rf "$directory"
    "$python" -m venv "$directory" || return 1
    # pip before 25.1 does not know --group
    "$directory/bin/python" -W ignore -m pip install --quiet --disable-pip-version-check "pip>=25.1" uv ||
        return 1
    # A JAX that is asked for comes first, and NVIDIA's wheels, since our build looks for their headers.
    first=
    for argument; do
        case $argument in jax* | nvidia*) first="$first $argument" ;; esac
    done
    # shellcheck disable=SC2086  # what to install are words
    { [ -z "$first" ] || install_into "$directory" $first; } || return 1
    for headers in "$PWD/$directory"/lib/python3*/site-packages/nvidia/cudnn/include; do
        [ -e "$headers/cudnn.h" ] && export CUDNN_INCLUDE_DIR="${CUDNN_INCLUDE_DIR:-$headers}"
    done
    install_into "$directory" "$@" && printf '%s\n' "$wanted" >"$directory/.installed"
}
