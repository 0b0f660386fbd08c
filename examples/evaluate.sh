#!/usr/bin/env bash
# Evaluate the model behind `quire serve` with lm-eval (EleutherAI's language model evaluation harness).
#
#     quire serve                                      in another terminal
#     pip install 'lm_eval[api]'
#     examples/evaluate.sh [TASK] [FLAGS OF lm-eval]   e.g. examples/evaluate.sh lambada_openai --limit 100
#
# Without a task it asks for twenty capitals (examples/evaluate), which needs no download. OPENAI_BASE_URL names
# another server. A score depends neither on num_concurrent nor on anything else the server computes meanwhile.
set -euo pipefail
task=${1:-capitals}
url=${OPENAI_BASE_URL:-http://127.0.0.1:8000/v1}

cd "$(dirname "${BASH_SOURCE[0]}")/evaluate"
read -r model length < <(python3 -c 'import json, sys, urllib.request as r
model = json.load(r.urlopen(sys.argv[1] + "/models"))["data"][0]
print(model["id"], model["max_model_len"])' "$url")
exec lm-eval run --model local-completions --include_path . --tasks "$task" \
  --model_args "model=$model,base_url=$url/completions,max_length=$length,num_concurrent=8" "${@:2}"
