#!/usr/bin/env bash
# Everything a machine with a GPU can show about the installed kvc, in one go: tests, compute-sanitizer, benchmarks.
# Usage: tests/run_gpu.sh RESULTS_FOLDER [step ...]   (steps: tests sanitizer bench; all by default)
# KVC_PEERS names a folder that bench/peers.py filled: the top-k benchmark then measures those kernels too.
set -u
results=$(mkdir -p "$1" && cd "$1" && pwd)
shift
steps=${*:-tests sanitizer bench}
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1
failed=0
run() {  # name, command...
  local name=$1
  shift
  echo "== $name: $*"
  "$@" >"$results/$name.log" 2>&1 || { failed=1; echo "   FAILED"; }
  tail -n "${lines:-4}" "$results/$name.log"
}
for step in $steps; do
  case $step in
    tests) run tests python3 -m pytest tests -q -m "cuda" -p no:cacheprovider ;;
    sanitizer)
      for tool in memcheck racecheck; do
        run "$tool" compute-sanitizer --tool "$tool" --error-exitcode 9 --kernel-regex kns=move_pages \
          python3 -m pytest tests -q -m cuda -p no:cacheprovider -k "(test_round_trip or test_unaligned_cold_rows or test_pinned_cold_rows) and not large"
        run "compaction_$tool" compute-sanitizer --tool "$tool" --error-exitcode 9 \
          --kernel-regex kns=compact_kernel --kernel-regex kns=pack_ \
          python3 -m pytest tests/test_compaction.py tests/test_compaction_pack.py -q -m cuda -p no:cacheprovider \
          -k "test_leading_run_stays or test_rows or skipped or by_hand or test_malformed_offsets or test_empty"
        run "topk_$tool" compute-sanitizer --tool "$tool" --error-exitcode 9 \
          --kernel-regex kns=select --kernel-regex kns=settle_ python3 -m pytest tests/test_topk.py -q -m cuda \
          -p no:cacheprovider -k "by_hand or test_last_place or test_edges or test_unaligned or test_short_between or stay_inside"
        run "triattention_$tool" compute-sanitizer --tool "$tool" --error-exitcode 9 \
          --kernel-regex kns=prepare_kernel --kernel-regex kns=score_kernel --kernel-regex kns=moments_kernel \
          --kernel-regex kns=stage_kernel --kernel-regex kns=cutlass --kernel-regex kns=mean_kernel \
          --kernel-regex kns=reduce_kernel --kernel-regex kns=mean_phase_kernel \
          python3 -m pytest tests/test_triattention.py -q -m cuda -p no:cacheprovider \
          -k "test_ragged or test_pages or test_far_lengths or test_no_pages or by_hand or test_requests or test_offsets"
      done ;;
    bench) lines=500 run bench python3 -m bench ${KVC_PEERS:+--peers "$KVC_PEERS"} --json "$results/bench.json" ;;
    *) echo "unknown step $step"; exit 2 ;;
  esac
done
exit $failed
