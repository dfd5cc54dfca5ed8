#!/usr/bin/env bash
# bench/h200.sh engines [OUT]    tokens/s of 1 to 8 engines on one GPU (docs/benchmarks.md, first table)
# bench/h200.sh learn [OUT]      the recipe digit on GPU 0, all Jobs sharing it
# bench/h200.sh stock OUT [ARGS] the loop with one stock engine on GPU 1, trainer on GPU 0; ARGS: --set section.field=value
# bench/h200.sh ours OUT [ARGS]  the same loop with asyncgrpo
# bench/h200.sh fsdp OUT [ARGS]  the same with the trainer on two GPUs, sharded
# For a machine with NVIDIA GPUs whose python3 has requirements/gpu.txt. Each needs minutes, writes what it measured to
# OUT (default: build/bench) and prints a table last. WORK (default: build/bench-work) keeps the model and what engines
# compiled.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
command=${1:-}
out=${2:-$root/build/bench}
work=${WORK:-$root/build/bench-work}
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 VLLM_NO_USAGE_STATS=1 ASYNCGRPO_CACHE=$work/cache
cd "$root"
mkdir -p "$out" "$ASYNCGRPO_CACHE"

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
  stock | ours)
    model
    "$python" -m bench.loop "$command" "$out" --set "model.id='$work/model'" "${@:3}"
    ;;
  fsdp) # the replica shares GPU 0 with half of the trainer
    model
    "$python" -m bench.loop ours "$out" --name fsdp --gpus 0,0,1 --set "model.id='$work/model'" \
      --set jobs.trainer_flavor=h200x2 --set trainer.gradient_accumulation_steps=8 "${@:3}"
    ;;
  learn)
    "$python" asyncgrpo.py emulate digit --gpus 0,0,0 --run "learn-$(date +%s)" --json | tee "$out/learn.json"
    ;;
  *)
    sed -n '2,9s/^# //p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
