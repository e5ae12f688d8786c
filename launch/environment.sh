# Sourced by the wrappers: sets $root, $python, the Python to run with, and $command, which runs tf_ipu_dp.
# Usage: source environment.sh TARGET
# With the target none, $python is the one that an environment would be made with, and none is made.
# With the target start, $command works without an environment too: help, mistakes and plans come at once, and what
# needs more starts the wrapper again with TF_IPU_DP_TARGET=run or distributed, which makes the environment.
# When nothing changed this compares one string and starts no Python; all else is python -m tf_ipu_dp.environment.
#   TF_IPU_DP_PYTHON  a version (3.8), a command or a path, in place of the best Python found
#   TF_IPU_DP_VENV    where the environment is, in place of .venv
#   TF_IPU_DP_CACHE   where built wheels are kept

# From the best to the last: TensorFlow 2.15 (default), 2.20 (modern), 2.6 (SDK-age). tf_ipu_dp/environment/versions.py
# has the same table.
supported_pythons="3.11 3.10 3.9 3.12 3.13 3.8"
: "${python_places:=/usr/local/bin /usr/bin /opt/*/bin ${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/*/bin ${HOME:-}/.local/bin ${HOME:-}/.local/share/uv/python/*/bin /opt/homebrew/bin}"

# Prints "sdk" for a Python whose TensorFlow is the Poplar SDK's, "yes" for one that can make the environment, else why not.
check_python() {
    "$1" -c '
import importlib.util as util, os, sys
version = "%d.%d" % sys.version_info[:2]
spec = util.find_spec("tensorflow") if sys.version_info >= (3, 6) else None
if spec and any(os.path.isdir(os.path.join(p, "python", "ipu")) for p in spec.submodule_search_locations or ()):
    print("sdk")
elif version not in sys.argv[1].split():
    print("is Python " + version)
elif not (util.find_spec("venv") and util.find_spec("ensurepip")):
    print("is Python %s without venv (apt-get install python%s-venv)" % (version, version))
else:
    print("yes")
' "$supported_pythons" 2>/dev/null || echo "does not start"
}

# Prints how to get a Python that works, by the means of this system, for a sentence. $1: what those that are here lack.
advise_python() {
    if type -P apt-get >/dev/null; then
        # Debian and Ubuntu have venv in a package of its own.
        if [[ $1 =~ is\ Python\ (3\.[0-9]+)\ without\ venv ]]; then
            echo "apt-get install python${BASH_REMATCH[1]}-venv"
            return
        fi
        # Debian 11 and 12, Ubuntu 20.04 to 24.04: python3 is 3.8 to 3.12; Debian 13 has 3.13.
        local offered
        offered=$(apt-cache policy python3 2>/dev/null) || offered=
        if [[ $offered =~ Candidate:\ (3\.[0-9]+) && " $supported_pythons " == *" ${BASH_REMATCH[1]} "* ]]; then
            echo "apt-get install python3 python3-venv (Python ${BASH_REMATCH[1]})"
            return
        fi
    fi
    if type -P pyenv >/dev/null; then
        echo "pyenv install 3.11"
    elif type -P uv >/dev/null; then # it was tried, quietly
        echo "uv python install 3.11, which says why uv could not get it"
    else
        echo "uv python install 3.11 (uv: pip install uv, or its installation page)"
    fi
}

# Sets $base to a Python that uv has, or fetches one after saying so.
find_python_of_uv() {
    type -P uv >/dev/null || return 1
    local version=${TF_IPU_DP_PYTHON:-${supported_pythons%% *}}
    # Without a download first: what is there may be in a place that was not searched.
    if ! base=$(uv python find --no-python-downloads "$version" 2>/dev/null); then
        echo "$program: no Python ${TF_IPU_DP_PYTHON:-"$pythons_in_words"} was found; uv is on the PATH and gets Python $version (about 30 MB)." >&2
        uv python install --quiet "$version" >&2 || return 1
        base=$(uv python find --no-python-downloads "$version" 2>/dev/null) || return 1
    fi
    verdict=$(check_python "$base")
    [[ $verdict == yes || $verdict == sdk ]]
}

# Sets $base to a Python that can run tf_ipu_dp.environment, and $verdict to what check_python says of it.
# Names on the PATH may be shims that fail, so each one is tried.
find_python() {
    local wanted=${TF_IPU_DP_PYTHON:-} pythons_in_words="3.8 to 3.13" candidates=() candidate version place reason
    local give="give a Python 3.8 to 3.13, by version, command or path."
    if [[ -n $wanted && ! $wanted =~ ^3\.[0-9]+$ ]]; then
        verdict=$(check_python "$wanted")
        [[ $verdict == yes || $verdict == sdk ]] && base=$wanted && return
        echo "$program: TF_IPU_DP_PYTHON=$wanted $verdict; $give" >&2
        return 1
    fi
    if [[ -n $wanted && " $supported_pythons " != *" $wanted "* ]]; then
        echo "$program: TF_IPU_DP_PYTHON=$wanted is not supported; $give" >&2
        return 1
    fi
    if [[ -z $wanted ]]; then
        for candidate in ${VIRTUAL_ENV:+"$VIRTUAL_ENV/bin/python"} python3 python; do
            type -P "$candidate" >/dev/null || continue
            verdict=$(check_python "$candidate")
            [[ $verdict == sdk ]] && base=$candidate && return
        done
    fi
    # An existing environment keeps its Python.
    [[ -z $wanted && -x $venv/bin/python ]] && candidates+=("$venv/bin/python")
    for version in ${wanted:-$supported_pythons}; do
        candidates+=("python$version")
        for place in $python_places; do candidates+=("$place/python$version"); done
    done
    [[ -z $wanted ]] && candidates+=(python3 python)
    local seen=""
    for candidate in "${candidates[@]}"; do
        type -P "$candidate" >/dev/null || continue
        verdict=$(check_python "$candidate")
        [[ $verdict == yes || $verdict == sdk ]] && base=$candidate && return
        # One Python has several names; the advice follows once.
        reason=${verdict%% (*}
        [[ $reason == is* && $seen == *" $reason"* ]] || seen+="${seen:+, }$candidate $reason"
    done
    find_python_of_uv && return
    echo "$program: no Python ${wanted:-"$pythons_in_words"} was found${seen:+ ($seen)}." \
        "Get one with $(advise_python "$seen"), or set TF_IPU_DP_PYTHON to the path of one." >&2
    return 1
}

target=${TF_IPU_DP_TARGET:-$1}
unset TF_IPU_DP_TARGET
program=launch/${0##*/}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=${TF_IPU_DP_VENV:-$root/.venv}
[[ $venv == /* ]] || venv=$PWD/$venv
# Reading the file back drops newlines at its end, so the key has none there.
key="$(cksum "$root"/setup.cfg "$root"/launch/constraints/*.txt "$root"/tf_ipu_dp/environment/*.py)
$(compgen -G "${VIRTUAL_ENV:-/nowhere}/lib/python3*/site-packages/tensorflow/python/ipu" || true)
$(type -P python3 || true) ${VIRTUAL_ENV:-} ${POPLAR_SDK_ENABLED:-} ${TF_IPU_DP_PYTHON:-} ${PYTHONPATH:-}."
python=$venv/bin/python
ready=$venv/ready-${target/start/run}
if [[ $target == none ]]; then
    find_python || exit 1
    python=$base
elif [[ ! -x $python || ! -f $ready || $(<"$ready") != "$key" ]]; then
    find_python || exit 1
    if [[ $target == start && $verdict != sdk ]]; then
        # Not -m: the directory that the user stands in, and PYTHONPATH, stay as they are.
        command=("$base" -c 'import sys; sys.path[0] = sys.argv[1]
from tf_ipu_dp import __main__; __main__.start_without_environment(*sys.argv[2:4], sys.argv[4:])'
            "$root" "$program" "$root/launch/tf-ipu-dp")
    else
        python=$(PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} "$base" -m tf_ipu_dp.environment "${target/start/run}" \
            --venv="$venv" --program="$program" --key="$key") || exit $?
        # A run's start-up counts from here: the same process becomes the command.
        read -r TF_IPU_DP_INSTALLED _ </proc/uptime 2>/dev/null && export TF_IPU_DP_INSTALLED || true
        # This clone is not installed in the Poplar SDK's environment.
        [[ $python == "$venv/bin/python" ]] || export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
    fi
fi
[[ -n ${command:-} ]] || command=("$python" -m tf_ipu_dp)
