#!/usr/bin/env bash
# Makes .venv with the pinned packages. Says nothing and takes no time when that is done already.
#
#   bash scripts/setup.sh [--dev] [--set cpu|gpu] [--dry-run [PYTHON_VERSION]]
#
#   --dev       linters, types and tests as well
#   --set       which requirements; without it: gpu where nvidia-smi works and there is a Python 3.12
#   --dry-run   resolve only, install nothing; for another Python with PYTHON_VERSION (say 3.12)
#
# PYTHON=/path/to/python3.11 names the interpreter. Where packages come from is pip's own business:
# its configuration files and PIP_* variables are honoured, no index is named here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

dev=0 dry_run=0 set_name="" dry_version=""
while [ $# -gt 0 ]; do
    case $1 in
        --dev) dev=1 ;;
        --set)
            set_name=${2:-nothing}
            [ $# -eq 1 ] || shift
            ;;
        --dry-run)
            dry_run=1
            case ${2:-} in [0-9]*) dry_version=$2 && shift ;; esac
            ;;
        *) echo "setup: unknown argument $1 (--dev, --set cpu|gpu, --dry-run [PYTHON_VERSION])" >&2 && exit 2 ;;
    esac
    shift
done
case $set_name in "" | cpu | gpu) ;; *) echo "setup: --set must be cpu or gpu, got '$set_name'" >&2 && exit 2 ;; esac

venv=.venv
log=$venv/setup.log

die() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

# Which interpreter a python is: version and home, or nothing if it does not run.
identity() {
    "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3], sys.base_prefix)' 2>/dev/null || true
}

# What an installed set was made from. The place counts: scripts in a moved .venv point to the old one.
fingerprint() {
    { cat "$@" "$venv/pyvenv.cfg" && pwd -P; } | sha256sum | cut -d' ' -f1
}

base_files() {
    echo requirements/common.txt
    ls requirements/"$1"*.txt
}

# Prints the first python of one of the given versions.
find_python() {
    local version name
    for version in "$@"; do
        for name in ${PYTHON:-"python$version" python3 python}; do
            case $(identity "$name") in "$version".*) command -v "$name" && return ;; esac
        done
    done
    return 1
}

choose_python() {
    python=""
    if [ "$set_name" != cpu ] && { [ "$set_name" = gpu ] || nvidia-smi -L >/dev/null 2>&1; }; then
        if python=$(find_python 3.12); then
            set_name=gpu
        elif [ "$set_name" = gpu ]; then
            die "the GPU set needs Python 3.12, and none was found; install it or name it: PYTHON=/path/to/python3.12"
        else
            echo "setup: there is a GPU but no Python 3.12, which the GPU set needs: taking the CPU set" >&2
        fi
    fi
    [ -n "$python" ] && return
    set_name=cpu
    python=$(find_python 3.11 3.12) || die \
        "Python 3.11 or 3.12 is needed, found ${PYTHON:+$PYTHON: }$(identity "${PYTHON:-python3}" | cut -d' ' -f1 | grep . || echo none)" \
        "install one (Debian, Ubuntu: python3.11 and python3.11-venv) or name it: PYTHON=/path/to/python3.11 bash scripts/..."
}

check_venv_module() {
    "$python" -c 'import venv, ensurepip' 2>/dev/null && return
    local version
    version=$(identity "$python" | cut -d. -f1,2)
    die "$python has no venv module; install it (Debian, Ubuntu: apt-get install python$version-venv) and run this again"
}

# pip with its output in the log; on failure the end of it and what to do.
run_pip() {
    "$venv/bin/python" -m pip "$@" --progress-bar off --disable-pip-version-check >>"$log" 2>&1 && return
    local advice
    if grep -qE 'No space left' "$log"; then
        advice="The disk is full: the CPU set takes about 2.3 GB, the GPU set about 12 GB."
    elif grep -qE 'NewConnectionError|NameResolutionError|establish a new connection|name resolution|ConnectTimeout|timed out|ProxyError|SSLError' "$log"; then
        advice="No package index could be reached. Check the network, the proxy and pip's configuration (pip config list; PIP_INDEX_URL, PIP_FIND_LINKS), then run the same command again: what is installed is kept."
    elif grep -qE 'No matching distribution' "$log"; then
        advice="pip's index does not offer that version for $("$venv/bin/python" -V) on $(uname -sm). Linux on x86-64 is what the pins are for."
    else
        advice="The whole log is $log. Run the same command again once the cause is gone: what is installed is kept."
    fi
    tail -n 8 "$log" | cut -c1-300 >&2
    die "installing failed: pip $*" "$advice"
}

resolve_only() {
    local folder pip target=()
    folder=$(mktemp -d)
    trap "rm -rf '$folder'" EXIT
    "$python" -m venv "$folder/venv"
    pip=$folder/venv/bin/pip
    # Older pips download whole wheels for a dry run.
    "$pip" install --quiet --disable-pip-version-check --upgrade pip
    [ -n "$dry_version" ] && target=(--python-version "$dry_version" --only-binary=:all: --target "$folder/target")
    echo "Resolving the $set_name set for Python ${dry_version:-$(identity "$python" | cut -d' ' -f1)}; nothing is installed"
    "$pip" install --dry-run --quiet --report "$folder/with.json" ${target[@]+"${target[@]}"} -r "requirements/$set_name.txt" ${1:+-r "$1"}
    "$pip" install --dry-run --quiet --report "$folder/without.json" ${target[@]+"${target[@]}"} --no-deps -r "requirements/$set_name-nodeps.txt"
    "$python" - "$folder/with.json" "$folder/without.json" <<'P'
import json, sys
for path in sys.argv[1:]:
    for item in sorted(json.load(open(path))["install"], key=lambda item: item["metadata"]["name"].lower()):
        print(item["metadata"]["name"], item["metadata"]["version"])
P
    [ "$set_name" = cpu ] || echo "not resolved: requirements/gpu-build.txt, which is compiled against the installed torch"
}

make_venv() {
    choose_python
    check_venv_module
    if [ -d "$venv" ] && [ ! -f "$venv/.stamp-base" ] && [ ! -f "$log" ] && [ -n "$(ls -A "$venv")" ]; then
        die "$venv was not made by this script; move it away, then run this again"
    fi
    local kind=CPU
    [ "$set_name" = cpu ] || kind=GPU
    echo "Setting up $venv: Python $(identity "$python" | cut -d' ' -f1), $kind set, one to three minutes (log: $log)"
    # Kept: a set-up that was cut short, or older pins. Remade: another Python, or a moved tree.
    if [ "$(identity "$venv/bin/python")" != "$(identity "$python")" ] || ! "$venv/bin/pip" --version >/dev/null 2>&1; then
        rm -rf "$venv"
        mkdir "$venv"
        : >"$log"
        "$python" -m venv "$venv" >>"$log" 2>&1 || { tail -n 3 "$log" >&2 && die "$python -m venv $venv failed"; }
    fi
}

install_base() {
    rm -f "$venv"/.stamp-*
    : >"$log"
    run_pip install -r "requirements/$set_name.txt"
    run_pip install --no-deps -r "requirements/$set_name-nodeps.txt"
    if [ "$set_name" = gpu ]; then
        echo "Compiling transformer-engine's torch extension: some minutes"
        run_pip install --no-build-isolation -r requirements/gpu-build.txt
    elif ! "$venv/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then
        echo "note: pip's index served torch's CUDA build, which works but is several GB larger; README.md says how to get the CPU build"
    fi
    echo "$set_name $(fingerprint $(base_files "$set_name"))" >"$venv/.stamp-base"
}

base_is_ready() {
    local installed hash
    [ -f "$venv/.stamp-base" ] || return 1
    read -r installed hash <"$venv/.stamp-base"
    [ -z "$set_name" ] || [ "$set_name" = "$installed" ] || return 1
    [ "$hash" = "$(fingerprint $(base_files "$installed"))" ] || return 1
    local have
    have=$(identity "$venv/bin/python")
    [ -n "$have" ] || return 1
    [ -z "${PYTHON:-}" ] || [ "$have" = "$(identity "$PYTHON")" ] || return 1
    set_name=$installed
}

if [ "$dry_run" = 1 ]; then
    choose_python
    check_venv_module
    dev_file=""
    [ "$dev" = 0 ] || dev_file=requirements/dev.txt
    resolve_only "$dev_file"
    exit
fi

started=$SECONDS changed=0
if ! base_is_ready; then
    make_venv
    install_base
    changed=1
fi
if [ "$dev" = 1 ]; then
    expected=$(fingerprint requirements/dev.txt)
    if [ "$(cat "$venv/.stamp-dev" 2>/dev/null)" != "$expected" ]; then
        [ "$changed" = 1 ] || echo "Adding the development tools to $venv (log: $log)"
        run_pip install -r requirements/dev.txt
        echo "$expected" >"$venv/.stamp-dev"
        changed=1
    fi
fi
[ "$changed" = 0 ] || echo "Set-up done in $((SECONDS - started)) s"
