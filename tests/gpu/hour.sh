#!/usr/bin/env bash
# The first quarter of an hour on a GPU: at most 900 s in commands of at most 600 s, to be repeated:
#
#   bash tests/gpu/hour.sh           # begins, or goes on where the command before ended
#
# Phases of at most 40 s each (tests/gpu/phases.py), what has never run on a GPU first. Each prints
# lines and writes JSON at once, and one that hangs costs its own limit. Status 0: all have run and
# passed; 1: all have run, and some failed or missed a target; 3: run it again.
#
# It stands alone on a host without pip and network: what the host lacks is in gpu-pack.tar.xz at
# the root of the checkout (tests/gpu/pack.py; PACK names another place). Figures are in
# gpu-hour.json at the root (STATE names another place) and copied to $OUT. REHEARSE=1 runs it
# small, without a GPU. ONLY="attention parity" runs some phases, also again; AFRESH=1 all of them.
set -u
cd "$(dirname "$0")/../.." || exit 2
if [ $# -ne 0 ]; then sed -n '2,15s/^# \{0,1\}//p' "$0"; exit 2; fi
seconds=600
python=${PYTHON:-python3}
pack=${PACK:-gpu-pack.tar.xz}
site=${SITE:-/tmp/tokend-gpu-site}
json=${STATE:-gpu-hour.json}
flags=(--hour --json "$json")
if [ -n "${AFRESH:-}" ]; then rm -rf "$json" "${json%.json}.d"; fi
if [ -n "${ONLY:-}" ]; then read -ra only <<<"$ONLY"; flags+=(--only "${only[@]}"); fi
if [ -n "${REHEARSE:-}" ]; then seconds=$((10 * seconds)) flags+=(--rehearse); fi

export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
if [ -f "$pack" ]; then
    "$python" -m tests.gpu.pack --unpack "$pack" "$site" || {
        echo "next: $pack does not unpack; make it again with python -m tests.gpu.pack"; exit 1
    }
    # Nothing is compiled: a module that was not built is a failure that names it.
    export PYTHONPATH=$PWD:$site FLASHINFER_DISABLE_JIT=1
fi
export FLASHINFER_USE_CUDA_NORM=1 FLASHINFER_WORKSPACE_BASE=${FLASHINFER_WORKSPACE_BASE:-/tmp/tokend-flashinfer}
for toolkit in /usr/local/cuda /usr/local/cuda-*; do
    if [ -z "${CUDA_HOME:-}" ] && [ -f "$toolkit/include/cuda_runtime.h" ]; then export CUDA_HOME=$toolkit; fi
    if [ -x "$toolkit/bin/compute-sanitizer" ]; then PATH=$PATH:$toolkit/bin; fi
done

timeout --kill-after 20 $((seconds - 20)) "$python" -m tests.gpu "${flags[@]}"
status=$?
if [ -n "${OUT:-}" ] && [ -f "$json" ]; then cp "$json" "${json%.json}.d"/*.json "$OUT" 2>/dev/null; fi
if [ $status -eq 0 ]; then exit 0; fi
echo "status $status. What failed is in the table above and in $json."
if [ $status -eq 3 ] || [ $status -ge 124 ]; then
    echo "next: bash tests/gpu/hour.sh again; it goes on with the phases that are left"
    exit 3
fi
cat <<'NEXT'
next: versions: the pack is for another Python or torch (make it again, see tests/gpu/pack.py).
      modules: a kernel does not load: read its line; unset FLASHINFER_DISABLE_JIT where nvcc is.
      operators: an operator has no CUDA form for that dtype: change its caller, not the list.
      attention: ONLY=attention again; then answers mean nothing until it passes.
      sampling, parity: speed may still be measured, answers are not to be trusted.
      a missed target alone is a figure, not a fault.
      a daemon is not ready: its output is in the error.
      draft-model, draft-head: plain-1b has the answers without drafts; without it they make them.
      the rest (memory checker, 8B over HTTP, transformers): make gpu-check ARGS="--only NAME".
NEXT
exit $status
