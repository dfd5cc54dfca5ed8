#!/usr/bin/env bash
# bench/h200.sh engines [OUT]    tokens/s of 1 to 8 engines on one GPU (docs/benchmarks.md, first table)
# bench/h200.sh learn [OUT]      the recipe digit on GPU 0, all Jobs sharing it
# bench/h200.sh stock [OUT]      the loop with one stock engine on the last GPU, trainer on GPU 0
# bench/h200.sh ours [OUT]       the same loop with asyncgrpo
# bench/h200.sh fsdp [OUT]       the trainer on two GPUs, sharded
# For a machine with NVIDIA GPUs whose python3 has requirements/gpu.txt. Each needs minutes, writes what it measured to
# OUT (default: build/bench) and prints a table last. WORK (default: build/bench-work) keeps the model and what engines
# compiled. STEPS sets the optimizer steps of a loop.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
command=${1:-}
out=${2:-$root/build/bench}
work=${WORK:-$root/build/bench-work}
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 VLLM_NO_USAGE_STATS=1
cd "$root"
mkdir -p "$out" "$work"

model() { # built once
  [[ -f $work/model/model.safetensors ]] || "$python" -m bench.models "$work/model"
}

serve() { # the replica in the background; its supervisor ends all of it
  "$python" -m bench.engines serve "$work/serve" --model "$work/model" --engines 8 >"$out/serve.log" 2>&1 &
  server=$!
  trap 'kill $server 2>/dev/null; wait $server' EXIT
  for _ in $(seq 600); do
    [[ -f $work/serve/ready.json ]] && return
    kill -0 $server || break
    sleep 1
  done
  tail -n 30 "$work/serve/replica.log" >&2
  return 1
}

case $command in
  engines)
    model
    rm -f "$work/serve/ready.json"
    serve
    "$python" -m bench.engines measure "$work/serve" "$out" --vocabulary 151643
    ;;
  learn)
    "$python" asyncgrpo.py emulate digit --gpus 0,0,0 --run "learn-$(date +%s)" --json | tee "$out/learn.json"
    ;;
  *)
    sed -n '2,9s/^# //p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
