#!/usr/bin/env bash
# run_test_model.sh MODEL BACKEND true|false|all [--require-weights] [pytest arguments]: the tests of
# one model with dynamic shapes, static shapes, or both. Real weights are read from the folder that
# the model's variable names; random ones are used where it is not set, unless --require-weights.
set -euo pipefail

usage="usage: run_test_model.sh MODEL BACKEND true|false|all [--require-weights] [pytest arguments]"
known="llama llama_finetune resnet50 stable_diffusion families hf vision language"
model="${1:-}" backend="${2:-}" dynamic="${3:-}"
variable="" holds=""

case "$(basename "${model#test_}" .py)" in
    llama)
        tests=(test_llama.py -k "not lora")
        variable=LLAMA_MODEL_DIR
        holds="a model: config.json and *.safetensors (Hugging Face), or params.json, *.pth and tokenizer.model (consolidated)"
        ;;
    llama_finetune)
        tests=(test_llama.py -k lora)
        variable=LLAMA_FINETUNE_DIR
        holds="base_model/ (a model as for LLAMA_MODEL_DIR) and alpaca_data.json (a list of instruction, input, output)"
        ;;
    resnet50) tests=(test_vision.py -k resnet50) ;;
    stable_diffusion | diffusion)
        tests=(test_diffusion.py)
        variable=STABLE_DIFFUSION_MODEL_DIR holds="a pipeline of diffusers: model_index.json, unet/"
        ;;
    families) tests=(test_families.py) ;;
    hf) tests=(test_language.py test_llama.py) ;;
    vision) tests=(test_vision.py) ;;
    language) tests=(test_language.py) ;;
    *)
        echo "unknown model '$model'; known ones: $known" >&2
        echo "$usage" >&2
        exit 2
        ;;
esac
case "$dynamic" in
    true | false) ;;
    all) dynamic=both ;;
    *)
        echo "$usage" >&2
        exit 2
        ;;
esac
shift 3
if [ "${1:-}" = --require-weights ]; then
    shift
    if [ -n "$variable" ] && [ -z "${!variable:-}" ]; then
        echo "$variable is not defined! It names a folder with $holds." >&2
        exit 1
    fi
elif [ -n "$variable" ] && [ -z "${!variable:-}" ]; then
    echo "random weights; for real ones set $variable to a folder with $holds"
fi

folder="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
command=(python -m pytest "${tests[@]/#test_/$folder/test_}" --backend "$backend" --dynamic "$dynamic" "$@")
echo "${command[@]@Q}"
exec "${command[@]}"
