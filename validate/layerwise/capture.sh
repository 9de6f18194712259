#!/usr/bin/env bash
# Traces that validate/layerwise/ddp.py takes its layers' times from: validate/layerwise/capture.sh FOLDER, on one H200.
set -euo pipefail
folder=${1:?a folder for the traces}
mkdir -p "$folder"
for step in alexnet:32 alexnet:128 vgg16:32 inception_v3:32; do
    file="$folder/${step%%:*}-train-b${step##*:}.json.gz"
    [[ -e $file ]] || python -m gpusim capture "torchvision:${step%%:*}" --mode train --batch "${step##*:}" -o "$file"
done
