#!/bin/bash
# Every benchmark of one GPU, one after the other, into RESULTS (default: benchmarks/results), then the page of results.
#
#   bash benchmarks/sweep.sh [NAME]      NAME is that of the device in the file names (default: h200)
#
# About fourteen minutes on an H200; SECONDS_A_CELL=3 makes a smoke run of seven. The machine must have nothing else to do:
# first audio hangs on the host as well. A benchmark that fails or runs over its minutes is told at the end, the rest go on.
set -uo pipefail
cd "$(dirname "$0")/.."
results=${RESULTS:-benchmarks/results} name=${1:-h200} cell=${SECONDS_A_CELL:-10}
mkdir -p "$results"
failed=()

run() {  # run MINUTES FILE MODULE FLAGS...
    local minutes=$1 file=$results/$2-$name.json module=$3; shift 3
    echo "== $module $*"
    timeout $((60 * minutes)) python3 -m "benchmarks.$module" --device cuda "$@" --out "$file" || failed+=("$module $*")
}

bf16="--precision bfloat16"
run 4 first-chunk first_chunk --profile latency --clients 1 4 16 --seconds "$cell"
run 2 first-chunk-plain first_chunk --plain --profile none --clients 1 --prompts 87 --seconds "$cell"
run 5 throughput throughput --clients 1 16 32 64 --rates 8 18 28 --delivery streamed --seconds "$cell"
run 4 whole throughput --profile whole --clients 1 16 64 --delivery whole --seconds "$cell"
run 2 overlap overlap
run 3 decode decode $bf16
run 2 stage1 stage1 $bf16
run 4 ablation ablation
run 2 vocoder vocoder
run 2 euler-step euler_step
run 3 flow stages $bf16 --shape released --streams 1 16 64 --peak-tflops 790

[ "$results" = benchmarks/results ] && python3 -m benchmarks.report
for one in "${failed[@]}"; do echo "failed: $one"; done
[ ${#failed[@]} = 0 ]
