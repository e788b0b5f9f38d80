#!/usr/bin/env bash
# Gather the pure Python packages that a machine with PyTorch and transformers may lack, to travel with a checkout:
#     benchmarks/carry.sh && PYTHONPATH=$PWD:$PWD/carry/site python3 -m benchmarks.gpu_step
set -eu
cd "$(dirname "$0")/.."
rm -rf carry/site
.venv/bin/python -m pip install --quiet --no-deps --no-compile --target carry/site \
    opacus==1.6.0 opt_einsum dp-accounting absl-py attrs mpmath rich markdown-it-py mdurl tyro docstring_parser \
    typeguard peft
rm -rf carry/site/examples carry/site/benchmarks carry/site/bin
find carry/site -name tests -type d -prune -exec rm -rf {} +
cp -r .venv/lib/python3*/site-packages/dpfed-*.dist-info carry/site/  # a run names the versions it stood on
du -sh carry/site
