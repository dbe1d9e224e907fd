set -eo pipefail
python3 t.py --b 2 2>&1 | tee -a /workspace/log
