#!/usr/bin/env bash
# bench/h200.sh engines [OUT]       tokens/s of 1 to 8 engines on one GPU (docs/benchmarks.md, first table)
# bench/h200.sh alike [OUT]         answers for tokens alone against vLLM's own, as it is and independent of the batch
# bench/h200.sh learn [OUT]         the recipe digit on GPU 0, all Jobs sharing it
# bench/h200.sh stock OUT [ARGS]    the loop with one stock engine on GPU 1, trainer on GPU 0; ARGS: --set section.field=value
# bench/h200.sh ours OUT [ARGS]     the same loop with asyncgrpo
# bench/h200.sh trainer OUT [ARGS]  the trainer alone on GPU 0, for which rollouts cost nothing
# bench/h200.sh fsdp OUT [ARGS]     the same on two GPUs, sharded, packed by tokens; with ARGS --set jobs.parallel=ddp: not sharded
# bench/h200.sh resume OUT [ARGS]   the loop with a sharded trainer that is killed once, the engine on GPU 0 as well
# For a machine with NVIDIA GPUs whose python3 has requirements/gpu.txt. Each needs minutes, writes what it measured to
# OUT (default: build/bench) and prints a table last. WORK (default: build/bench-work) keeps the model and what engines
# compiled.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
command=${1:-}
out=${2:-$root/build/bench}
work=${WORK:-$root/build/bench-work}
python=${PYTHON:-python3}
two_gpus=(--set jobs.trainer_flavor=h200x2 --set trainer.per_device_train_batch_size=16 --set trainer.token_budget=16700)
export PYTHONUNBUFFERED=1 VLLM_NO_USAGE_STATS=1 ASYNCGRPO_CACHE=$work/cache
cd "$root"
mkdir -p "$out" "$ASYNCGRPO_CACHE"

model() { # built once
  [[ -f $work/model/model.safetensors ]] || "$python" -m bench.models "$work/model"
}

serve() { # the replica in the background; its supervisor ends all of it
  rm -f "$work/serve/ready.json"
  "$python" -m bench.engines serve "$work/serve" --model "$work/model" "$@" >"$out/serve.log" 2>&1 &
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

loop() { # loop KIND [ARGS]
  model
  "$python" -m bench.loop "$1" "$out" --set "model.id='$work/model'" "${@:2}"
}

case $command in
  engines)
    model
    serve --engines 8
    "$python" -m bench.engines measure "$work/serve" "$out" --vocabulary 151643
    ;;
  alike)
    model
    for invariant in 0 1; do # what is independent of the batch cannot be compiled
      VLLM_BATCH_INVARIANT=$invariant serve --engines 1 --flag enforce_eager=true
      "$python" -m bench.engines alike "$work/serve" "$out" --vocabulary 151643
      kill $server
      wait $server || true
    done
    ;;
  stock | ours | trainer)
    loop "$command" "${@:3}"
    ;;
  fsdp)
    loop trainer --name fsdp --gpus 0,0,1 "${two_gpus[@]}" "${@:3}"
    ;;
  resume)
    loop ours --name resume --gpus 0,0,1 "${two_gpus[@]}" --set trainer.token_budget=8350 \
      --set trainer.per_device_train_batch_size=8 --set trainer.gradient_accumulation_steps=8 \
      --set trainer.save_strategy=steps --set trainer.save_steps=2 \
      --faults 'kill trainer at step 5' "${@:3}"
    ;;
  learn)
    "$python" asyncgrpo.py emulate digit --gpus 0,0,0 --run "learn-$(date +%s)" --json | tee "$out/learn.json"
    ;;
  *)
    sed -n '2,12s/^# //p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
