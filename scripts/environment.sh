# Sourced by scripts/serve and scripts/test: makes the virtual environment .venv beside this
# folder, installs the package with the extras asked for, and activates it. Needs Python 3.11 to
# 3.13 and PyPI. Does nothing when the environment already fits.
#
# usage: prepare_environment EXTRAS     (for example: "test,bench")

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
            2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "needs Python 3.11, 3.12 or 3.13; set PYTHON to one" >&2
    return 1
}

prepare_environment() {
    local extras=$1 python stamp wanted
    local environment=${SGL_JAX_VENV:-$repository/.venv}
    python=$(find_python) || exit 1
    stamp=$environment/.installed-$extras
    wanted=$("$python" -c 'import sys; print(sys.version)'; cat "$repository/pyproject.toml")
    if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
        echo "installing into $environment ..." >&2
        # An environment without pip is what a failed attempt leaves behind.
        "$environment/bin/python" -m pip --version >/dev/null 2>&1 ||
            "$python" -m venv --clear "$environment"
        # Python compiles the modules that are imported; to compile all takes a minute.
        "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
            --editable "$repository${extras:+[$extras]}" >&2
        echo "$wanted" >"$stamp"
    fi
    # shellcheck disable=SC1091
    source "$environment/bin/activate"
}

has_tpu() {
    [ -e /dev/accel0 ] || { [ -d /dev/vfio ] && [ -n "${TPU_ACCELERATOR_TYPE:-}" ]; }
}
