#!/usr/bin/env bash
# ./build.sh emulate [RECIPE] [OPTIONS]   train on this machine: 2 replicas, proxy, trainer, bucket (default: digit)
# ./build.sh test [PYTEST OPTIONS]        all tests
# ./build.sh test-matrix [TRL VERSION...] the real loop with each supported TRL (minutes; not part of test)
# ./build.sh check                        lint, format and types
# ./build.sh build                        dist/asyncgrpo.pyz
# ./build.sh bench routing|proxy [--json] figures of a part beside its alternatives
# Each does its own set-up, once: a virtual environment in .venv from requirements/cpu.txt. Needs Linux on x86_64 and
# Python 3.11, 3.12 or 3.13 with venv. Set-up talks on stderr; stdout and exit status are the command's own.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
bin=$root/.venv/bin

say() { echo "build.sh: $*" >&2; }

find_python() {
  local name
  for name in python3.11 python3 python3.12 python3.13; do # the lock has wheels for all three; 3.11 is what is tested
    # A found name may still be a shim for a version that is not installed, or lack venv's parts: try it.
    if "$name" -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  say "needs Python 3.11, 3.12 or 3.13 with venv on the PATH (Debian: python3 and python3-venv)."
  exit 2
}

install() {
  local stamp=$root/.venv/installed wanted
  wanted=$(cat "$root/requirements/cpu.txt" "$root/tools/vllm_metadata.py" | sha256sum)
  [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && return
  say "installing requirements/cpu.txt into .venv (2 to 3 minutes, 3 GB, once)"
  local pip=("$bin/python" -m pip install --quiet --quiet --disable-pip-version-check --no-compile)
  "${pip[@]}" --constraint "$root/requirements/cpu.txt" torch # with its dependencies: elsewhere it may be a CUDA build
  "${pip[@]}" --no-deps --requirement "$root/requirements/cpu.txt"
  "${pip[@]}" --no-deps "$("$bin/python" "$root/tools/vllm_metadata.py" "$root/build")"
  "$bin/python" -m compileall -qq -j 0 "$root/.venv/lib" || true # some packages ship templates that are not Python
  echo "$wanted" >"$stamp"
}

setup() { # one caller at a time; the archive is made while pip waits for the network
  {
    flock 9
    [[ -x $bin/python ]] || { python=$(find_python) && "$python" -m venv "$root/.venv"; }
    "$bin/python" "$root/tools/make_pyz.py" &
    install
    wait $!
    ln -sf "$root/dist/asyncgrpo.pyz" "$bin/asyncgrpo"
  } >&2 9>"$root/.setup.lock"
}

command=${1:-}
shift || true
case $command in
  emulate)
    setup
    exec "$bin/python" "$root/dist/asyncgrpo.pyz" emulate "$@"
    ;;
  test)
    setup
    cd "$root" && exec "$bin/python" -m pytest "$@"
    ;;
  test-matrix)
    setup
    exec "$bin/python" "$root/tools/trl_matrix.py" "$@"
    ;;
  check)
    setup
    cd "$root"
    status=0 # all three are run, so that one call shows everything
    "$bin/ruff" check --quiet || status=1
    "$bin/ruff" format --quiet --check || status=1
    "$bin/mypy" || status=1
    exit $status
    ;;
  build)
    setup
    ls -l "$root/dist/asyncgrpo.pyz"
    ;;
  bench)
    setup
    exec "$bin/python" "$root/dist/asyncgrpo.pyz" bench "$@"
    ;;
  *)
    sed -n '2,9s/^# //p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
