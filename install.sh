#!/bin/sh
# Installs the course into a virtual environment: sh install.sh [EXTRA of pyproject.toml]. `make lab` and `make test` call it.
# sh install.sh FILE.txt installs what that file lists, without the course, as `make site` does.
#   PYTHON       the interpreter; without it, the first on the PATH that runs and is recent enough
#   VENV         the virtual environment's folder, .venv unless you say otherwise
#   TORCH        another PyTorch than the course's, such as 2.15.0
#   TORCH_INDEX  the address of a second package index, for a smaller PyTorch
#   UV           uv's path; uv installs if it's on the PATH; otherwise, or if UV is empty, pip does
#   UV_TORCH_BACKEND  for uv: which of PyTorch's own builds, such as cpu
set -eu
cd "$(dirname "$0")"
extra=${1:-grade} venv=${VENV:-.venv} uv=${UV-$(command -v uv || true)}

stop() {
    echo "install.sh: $1" >&2
    exit 1
}

works() { # a shim may be on the PATH with no Python behind it
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' >/dev/null 2>&1
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        works "$PYTHON" || stop "PYTHON=$PYTHON doesn't run, or isn't Python 3.11 to 3.14: name another one"
        echo "$PYTHON"
        return
    fi
    for name in python3.11 python3.12 python3.13 python3.14 python3; do
        rest=$PATH:
        while [ -n "$rest" ]; do
            found=${rest%%:*}/$name rest=${rest#*:}
            if works "$found"; then
                echo "$found"
                return
            fi
        done
    done
    stop "found no Python 3.11 to 3.14 that runs. Install one (Debian, Ubuntu: apt install python3 python3-venv), or name yours with PYTHON=/path/to/python"
}

case $extra in *.txt) list=$extra ;; *) list= ;; esac
extras=$(sed -n '/^\[project.optional-dependencies\]/,/^\[tool/s/^\([a-z]*\) = \[.*/\1/p' pyproject.toml)
case "
$extras
" in
*"
$extra
"*) ;;
*) [ -n "$list" ] || stop "pyproject.toml has no extra '$extra': use one of $(echo $extras | sed 's/ /, /g')" ;;
esac

# 1. A virtual environment
if ! works "$venv/bin/python"; then
    [ ! -e "$venv/bin/python" ] || stop "the Python of $venv is gone, or isn't 3.11 to 3.14: remove $venv with 'make clean', and run this again"
    python=$(find_python)
    if [ -n "$uv" ]; then
        "$uv" venv --quiet --seed --allow-existing --python "$python" "$venv" || stop "uv couldn't make $venv; it says why above. To use pip instead, set UV= (empty)"
    else
        "$python" -c 'import ensurepip, venv' 2>/dev/null ||
            stop "$python can't make virtual environments: a part of it is missing. Install that part (Debian, Ubuntu: apt install python3-venv), or install uv"
        "$python" -m venv "$venv" || stop "$python couldn't make $venv; it says why above"
    fi
fi

# 2. What goes into it
constraints=constraints.txt
if [ -n "${TORCH:-}" ]; then # it decides which Triton goes with it
    constraints=$venv/constraints.txt
    sed -e "s/^torch==.*/torch==$TORCH/" -e '/^triton==/d' constraints.txt >"$constraints"
fi
if [ -z "$list" ] && ! "$venv/bin/python" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; then
    size="about 0.5 GB"
    if [ -z "${TORCH_INDEX:-}${UV_TORCH_BACKEND:-}" ] && [ "$(uname -s)" = Linux ]; then
        size="about 3 GB, because PyTorch brings CUDA, and fills 6 GB of disk (README.md says how to get a smaller one)"
    fi
    echo "The first installation downloads $size. If it's interrupted, run it again."
fi
if [ -n "$uv" ] && [ -z "$list" ] && [ -n "${UV_TORCH_BACKEND:-}" ]; then # uv would look for Triton, too, among PyTorch's builds alone
    "$uv" pip install --python "$venv/bin/python" --constraint "$constraints" torch || stop "uv couldn't install PyTorch's build '$UV_TORCH_BACKEND'; it says why above"
fi
unset UV_TORCH_BACKEND
if [ -n "$uv" ]; then
    set -- "$uv" pip install --python "$venv/bin/python" ${TORCH_INDEX:+--index "$TORCH_INDEX" --index-strategy unsafe-best-match}
else
    set -- "$venv/bin/python" -m pip --disable-pip-version-check install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"}
fi
if [ -n "$list" ]; then
    set -- "$@" --requirement "$list"
else
    set -- "$@" --constraint "$constraints" --editable ".[$extra]"
fi
"$@" ||
    stop "the installation failed, and the lines above say why. If they mention a connection, this machine can't reach the package index: check its network or set HTTPS_PROXY, and run this again"
echo "Installed into $venv."
