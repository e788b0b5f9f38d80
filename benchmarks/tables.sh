#!/usr/bin/env bash
# Both tables of real tasks on one GPU: every algorithm on CIFAR-100, and fine-tuning beside a PEFT loop there and on SST-2.
#     BENCH_CIFAR=... BENCH_VIT=... BENCH_TEXT=... benchmarks/tables.sh FOLDER SECONDS
# Some processes side by side, each with many runs one after the other: what shares a compiled program shares a process. FOLDER
# gets lines of results, and is read first: what is there is not run again. PYTHON, DEVICE, BACKEND, EVERY and BESIDE may be set.
set -u
folder=$1 seconds=$2
began=$(date +%s)
mkdir -p "$folder"
: "${PYTHON:=python3}" "${DEVICE:=cuda}" "${BACKEND:=inductor}"
: "${EVERY:=--rounds 16 --central-rounds 80 --steps 5 --cohort 10 --batch 64 --central-batch 64}" "${BESIDE:=}"
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-/tmp/inductor} TORCHINDUCTOR_COMPILE_THREADS=3
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
how="--device $DEVICE --backend $BACKEND --compile yes --precision bfloat16 --limit 60"
every="$PYTHON -m benchmarks.every_algorithm --task benchmarks.real_tasks:small_vit_on_cifar $EVERY --epsilon 8 --clip 1"
beside="$PYTHON -m benchmarks.beside_peft"

start() { # NAME COMMAND...: what does not end in time is ended
    local name=$1
    shift
    timeout -k 5 $((seconds - 30)) "$@" $how --results "$folder/$name.jsonl" --budget $((seconds - 55)) > "$folder/$name.log" 2>&1 &
}

federated="FAFED, FedA FedC FedL FedO FedP FedS Local Scaffold"
start every-plain $every --memory 16 --columns plain
start every-local $every --memory 16 --columns local --only $federated
start every-server $every --memory 16 --columns local distributed --only SGD Adam MicroAdam
for kind in "vit --epochs 3" "minilm --epochs 1"; do
    name=${kind%% *}
    start "$name-loop" $beside $kind $BESIDE --only PEFT
    start "$name-plain" $beside $kind $BESIDE --memory 16 --only AdamW Fed
    start "$name-private" $beside $kind $BESIDE --memory 36 --only DP
done
wait

for table in every vit minilm; do
    cat "$folder/$table"-*.jsonl > "$folder/all-$table.jsonl"
done
$every --results "$folder/all-every.jsonl" --budget 0 > "$folder/every.md" &
for kind in vit minilm; do
    $beside $kind --results "$folder/all-$kind.jsonl" --budget 0 --num-records 1 > "$folder/$kind.md" &
done
wait
cat "$folder"/{every,vit,minilm}.md
for log in "$folder"/*.log; do
    grep -q "^Traceback" "$log" && echo "== $log" && tail -n 4 "$log" | cut -c1-600
done | tee "$folder/errors.txt"
grep -ho '"notes": .*' "$folder"/all-*.jsonl | sort | uniq -c | tee -a "$folder/errors.txt"
echo "$(($(date +%s) - began)) s"
