#!/usr/bin/env bash
# Everything a machine with a GPU can show about the installed kvc, in one go: tests, compute-sanitizer, benchmarks.
# Usage: tests/run_gpu.sh RESULTS_FOLDER [step ...]   (steps: tests sanitizer bench; all by default)
# Leaves a log of each command, checks.jsonl with what tests and sanitizer found, and bench.json.
# KVC_PEERS names a folder that bench/peers.py filled: benchmarks then measure those kernels too.
set -u
results=$(mkdir -p "$1" && cd "$1" && pwd)
shift
steps=${*:-tests sanitizer bench}
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1
failed=0
run() {  # name, command...
  local name=$1 status=0
  shift
  echo "== $name: $*"
  "$@" >"$results/$name.log" 2>&1 || status=$?
  [ "$status" = 0 ] || { failed=1; echo "   FAILED"; }
  tail -n "${lines:-4}" "$results/$name.log"
  [ "$name" = bench ] || printf '{"check": "%s", "status": %d, "found": "%s"}\n' "$name" "$status" \
    "$(grep -E ' in [0-9.]+s|SUMMARY' "$results/$name.log" | tr -d '="\\' | tr '\n' ' ')" >>"$results/checks.jsonl"
}
sanitize() {  # name, kernels, pytest's arguments...
  local name=$1 kernels=$2 tool variables
  shift 2
  for tool in memcheck racecheck; do
    variables=()  # memcheck sees the end of a tensor only where each has an allocation of its own
    [ "$tool" = racecheck ] || variables=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1)
    # shellcheck disable=SC2046,SC2086
    run "${name}_$tool" "${variables[@]}" compute-sanitizer --tool "$tool" --error-exitcode 9 \
      $(printf -- '--kernel-regex kns=%s ' $kernels) python3 -m pytest -q -m cuda -p no:cacheprovider "$@"
  done
}
for step in $steps; do
  case $step in
    tests)  # hypothesis's tests choose their devices by themselves
      run tests python3 -m pytest tests -q -m "cuda or hypothesis" -p no:cacheprovider
      run triton_scorer env KVC_TRIATTENTION_SCORER=triton \
        python3 -m pytest tests/test_triattention.py -q -m "cuda or hypothesis" -p no:cacheprovider
      for gpu in sm_80 sm_120; do
        run "topk_as_on_$gpu" env KVC_TOPK_AS_ON=$gpu \
          python3 -m pytest tests/test_topk.py -q -m "cuda or hypothesis" -p no:cacheprovider
      done
      ;;
    sanitizer)
      sanitize nvfp4 "move_pages encode_runs upload_kernel" tests/test_nvfp4_ops.py \
        -k "(test_round_trip or test_unaligned_cold_rows or test_pinned_cold_rows) and not large"
      sanitize compaction "compact_kernel pack_" tests/test_compaction.py tests/test_compaction_pack.py \
        -k "test_leading_run_stays or (test_shifted_run and -16]) or test_growing_distance or (test_rows and padded) \
          or skipped or by_hand or test_malformed_offsets or test_empty"
      sanitize topk "select settle_" tests/test_topk.py \
        -k "by_hand or test_last_place or test_edges or test_unaligned or test_short_between or stay_inside or test_all_zero"
      sanitize triattention "prepare_kernel score_kernel moments_kernel stage_kernel cutlass mean_kernel reduce_kernel mean_phase_kernel" \
        tests/test_triattention.py \
        -k "test_ragged or test_pages or test_far_lengths or test_no_pages or by_hand or test_requests or test_offsets"
      ;;
    bench) lines=500 run bench python3 -m bench ${KVC_PEERS:+--peers "$KVC_PEERS"} --json "$results/bench.json" ;;
    *) echo "unknown step $step"; exit 2 ;;
  esac
done
exit $failed
