#!/usr/bin/env bash
# The first hour on a GPU, as four commands of at most seven minutes, in the order of what they prove:
#
#   bash tests/gpu/first_hour.sh a     versions, limits, kernels, sampling, parity, decode of 1B
#   bash tests/gpu/first_hour.sh b     8B: decode, prefill, steps, where their time goes; drafts on 1B
#   bash tests/gpu/first_hour.sh c     the daemon: 8B under load, each feature over HTTP on 1B; quantised products
#   bash tests/gpu/first_hour.sh d     memory checker; transformers on the same device; experts of mixtures
#
# Each stands alone on a host without pip and network: what the host lacks is in gpu-pack.tar.xz at
# the root of the checkout (tests/gpu/pack.py; PACK names another place). Figures go to
# $OUT/first-hour-PART.json, or to the root without OUT. REHEARSE=1 runs all of it small, without a
# GPU. ONLY="attention parity" runs some phases of a part.
set -u
cd "$(dirname "$0")/../.." || exit 2
part=${1:-}
case $part in
a) seconds=420 proves="kernels and numbers" ;;
b) seconds=420 proves="speed of steps, and drafts" ;;
c) seconds=420 proves="the daemon" ;;
d) seconds=420 proves="memory accesses, and experts" ;;
*) sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
python=${PYTHON:-python3}
pack=${PACK:-gpu-pack.tar.xz}
site=${SITE:-/tmp/tokend-gpu-site}
json=${OUT:-.}/first-hour-$part.json
flags=(--json "$json" --seconds $((seconds - 40)))
if [ -n "${ONLY:-}" ]; then read -ra only <<<"$ONLY"; flags+=(--only "${only[@]}")
else flags+=(--part "$part"); fi
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

echo "first hour, $part: $proves; at most $seconds s"
timeout --kill-after 20 "$seconds" "$python" -m tests.gpu "${flags[@]}"
status=$?
if [ $status -ne 0 ]; then
    echo "first hour, $part: status $status. What failed is in the table above and in $json."
    case $part in
    a) cat <<'NEXT'
next: versions: the pack is for another Python or torch (make it again, see tests/gpu/pack.py).
      modules: a kernel does not load: read its line; unset FLASHINFER_DISABLE_JIT where nvcc is.
      operators: an operator has no CUDA form for that dtype: change its caller, not the list.
      attention: ONLY=attention again; then b and c mean nothing until it passes.
      sampling, parity: b may still be measured, c's answers are not to be trusted.
NEXT
    ;;
    b) cat <<'NEXT'
next: a missed target alone is a figure, not a fault: go on with c, and read the probe's kernels.
      out of memory: ONLY=decode-1b shows whether the path runs at all.
      phases that ended at their limit keep their figures; ONLY=probe runs by itself.
NEXT
    ;;
    c) cat <<'NEXT'
next: the daemon is not ready: its output is in the error; then ONLY=answers-1b (2.5 GB, not 16).
      one feature fails: the others stand; the error has the answer that was given.
      tokens with graphs differ from eager ones: run a with ONLY=attention, then d.
NEXT
    ;;
    d) cat <<'NEXT'
next: the checker is missing: its phases say so, transformers' figures stand.
      Invalid read or write: the kernel's name is in the lines above it.
      ended at its limit: ONLY=memory-mixed by itself, with the time of all four.
NEXT
    ;;
    esac
fi
exit $status
