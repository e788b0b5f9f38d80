#!/usr/bin/env bash
# Both tables of real tasks on one GPU: every algorithm on CIFAR-100, and fine-tuning beside a PEFT loop there and on SST-2.
#     BENCH_CIFAR=... BENCH_VIT=... BENCH_TEXT=... benchmarks/tables.sh FOLDER SECONDS
# Some processes side by side, each with many runs one after the other: what shares a compiled program shares a process. FOLDER
# gets lines of results, and is read first: what is there is not run again. With 0 seconds the tables are printed from it.
# ONLY="every-plain vit" starts only processes whose names begin so. PYTHON, DEVICE, BACKEND, EVERY and BESIDE may be set, too.
set -u
folder=$1 seconds=$2
began=$(date +%s)
mkdir -p "$folder"
: "${PYTHON:=python3}" "${DEVICE:=cuda}" "${BACKEND:=inductor}" "${ONLY:=every vit minilm}"
: "${EVERY:=--rounds 16 --central-rounds 80 --steps 5 --cohort 10 --batch 64 --central-batch 64}" "${BESIDE:=}"
export TORCHINDUCTOR_COMPILE_THREADS=3
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
how="--device $DEVICE --backend $BACKEND --compile yes --precision bfloat16 --limit 90"
every="$PYTHON -m benchmarks.every_algorithm --task benchmarks.real_tasks:small_vit_on_cifar $EVERY --epsilon 8 --clip 1"
beside="$PYTHON -m benchmarks.beside_peft"

gather() { # TABLE FILE: the lines of all its processes; what crashed is to be tried again
    cat "$folder/$1"-*.jsonl 2> /dev/null | grep -v '"crash"' > "$folder/gathered"
    mv "$folder/gathered" "$2"
}

start() { # NAME COMMAND...: if it is asked for; what does not end in time is ended
    local name=$1 one
    shift
    for one in $ONLY; do
        [[ $name == "$one"* ]] || continue
        timeout -k 5 $((seconds - 30)) "$@" $how --known "$folder/${name%%-*}-before.jsonl" --results "$folder/$name.jsonl" \
            --budget $((seconds - 55)) > "$folder/$name.log" 2>&1 &
        return
    done
}

for table in every vit minilm; do
    gather $table "$folder/before"
    rm -f "$folder/$table"-*.jsonl
    mv "$folder/before" "$folder/$table-before.jsonl"
done
if ((seconds)); then
    rm -f "$folder"/*.log
    part=0
    for federated in "FedA* FedC* FedL*" "FedO* FedP* FedS*" "Scaffold* FAFED* Local*"; do
        part=$((part + 1))
        start every-plain-$part $every --memory 16 --columns plain --only $federated
        start every-local-$part $every --memory 16 --columns local --only $federated
    done
    start every-plain-4 $every --memory 16 --columns plain --only SGD* Adam* MicroAdam*
    start every-server $every --memory 16 --columns local distributed --only SGD* Adam* MicroAdam*
    for kind in "vit --epochs 3" "minilm --epochs 1"; do
        name=${kind%% *}
        start "$name-loop" $beside $kind $BESIDE --only "PEFT loop*"
        start "$name-adamw" $beside $kind $BESIDE --memory 16 --only "AdamW" "AdamW, drawn afresh"
        start "$name-float32" $beside $kind $BESIDE --memory 16 --only "AdamW, float32"
        start "$name-federated" $beside $kind $BESIDE --memory 16 --only "Fed*"
        start "$name-private" $beside $kind $BESIDE --memory 36 --only "DP-*"
    done
    wait
fi

grep -h '"crash"' "$folder"/{every,vit,minilm}-*.jsonl | sed 's/^/CRASHED: /' > "$folder/errors.txt"
for log in "$folder"/*.log; do
    grep -q "^Traceback" "$log" 2> /dev/null && echo "ENDED: $log" && tail -n 4 "$log" | cut -c1-600
done >> "$folder/errors.txt"
for table in every vit minilm; do
    gather $table "$folder/all-$table.jsonl"
done
$every --results "$folder/all-every.jsonl" --budget 0 > "$folder/every.md" &
for kind in vit minilm; do
    $beside $kind --results "$folder/all-$kind.jsonl" --budget 0 --num-records 1 > "$folder/$kind.md" &
done
wait
cat "$folder"/{every,vit,minilm}.md
grep -ho '"notes": .*' "$folder"/all-*.jsonl | sort | uniq -c >> "$folder/errors.txt"
cat "$folder/errors.txt"
echo "$(($(date +%s) - began)) s"
