#!/usr/bin/env bash
# The versions that pyproject.toml promises, beside the newest ones that constraints.txt pins and `make test` uses:
# every supported Python (without torch: its pinned build is for one Python), and the oldest supported packages.
# Each gets a virtual environment in .venv-versions, which is kept for the next time.
set -euo pipefail
cd "$(dirname "$0")/.."
fast=(-q -n 2 -m 'not torch' tests/core tests/dialects tests/cli tests/report tests/boundaries src/batchwright/core)
python=${PYTHON:-python3}

find_python() {  # 3.12: a command, or one that pyenv keeps
  local found
  for found in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
    "$found" -c '' 2>/dev/null && { echo "$found"; return; }
  done
  echo "Python $1 is not installed, and pyproject.toml promises it" >&2
  return 1
}
install() {  # ENVIRONMENT PYTHON REQUIREMENT...: torch by its exact pin, from the caller
  local bin=.venv-versions/$1/bin
  test -x "$bin/pip" || "$2" -m venv --clear ".venv-versions/$1"
  "$bin/pip" install --quiet --disable-pip-version-check "${@:3}"
  "$bin/pip" install --quiet --disable-pip-version-check --no-deps -e .
}

for version in 3.12 3.13; do
  echo "== Python $version"
  install "$version" "$(find_python "$version")" -c constraints.txt click PyYAML rich plotext hypothesis pytest pytest-xdist
  ".venv-versions/$version/bin/python" -m pytest "${fast[@]}"
done
echo "== the oldest packages"
install oldest "$python" -r constraints-oldest.txt
bin=.venv-versions/oldest/bin/python
"$bin" -m pytest "${fast[@]}"
"$bin" -m pytest -q -n 2 --dist loadfile tests/estimate/test_jax_step.py tests/estimate/test_fake.py tests/runtime
echo "== the oldest Lightning"
grep -v lightning== constraints.txt > .venv-versions/constraints-lightning.txt
install lightning "$python" -c .venv-versions/constraints-lightning.txt \
  torch numpy click PyYAML rich plotext hypothesis pytest pytest-xdist transformers lightning==2.6.0
CI=1 .venv-versions/lightning/bin/python -m pytest -q -n 2 tests/adapters/test_lightning.py tests/adapters/test_lightning_loss.py
echo "== the oldest transformers"
install oldest-hf "$python" torch==2.13.0 numpy transformers==5.20.0 accelerate==1.15.0 peft==0.21.0 trl==1.16.0 datasets==5.2.0 click PyYAML rich \
  plotext hypothesis pytest pytest-xdist
CI=1 .venv-versions/oldest-hf/bin/python -m pytest -q -n 2 --dist loadfile tests/adapters/test_adapter.py tests/adapters/test_huggingface.py \
  tests/adapters/test_huggingface_loss.py
CI=1 .venv-versions/oldest-hf/bin/python -m pytest -q -k huggingface tests/adapters/test_run.py
