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
  install "$version" "$(find_python "$version")" -c constraints.txt click PyYAML rich plotext \
    vl-convert-python hypothesis pytest pytest-xdist
  ".venv-versions/$version/bin/python" -m pytest "${fast[@]}"
done
echo "== the oldest packages"
install oldest "$python" -r constraints-oldest.txt
bin=.venv-versions/oldest/bin/python
"$bin" -m pytest "${fast[@]}"
"$bin" -m pytest -q -n 2 --dist loadfile tests/estimate/test_fake.py tests/runtime
echo "== the oldest JAX, without torch"
install oldest-jax "$python" -r constraints-oldest-jax.txt
.venv-versions/oldest-jax/bin/python -m pytest -q -n 2 --dist loadfile tests/estimate/test_jax_step.py tests/jax
echo "== the oldest Lightning"
grep -v lightning== constraints.txt > .venv-versions/constraints-lightning.txt
install lightning "$python" -c .venv-versions/constraints-lightning.txt \
  torch numpy click PyYAML rich plotext hypothesis pytest pytest-xdist transformers lightning==2.6.0
CI=1 .venv-versions/lightning/bin/python -m pytest -q -n 2 tests/adapters/test_lightning.py tests/adapters/test_lightning_loss.py
CI=1 .venv-versions/lightning/bin/python -m pytest -q -k lightning tests/adapters/test_run.py
echo "== the oldest transformers"
install oldest-hf "$python" torch==2.13.0 numpy transformers==5.20.0 accelerate==1.15.0 peft==0.21.0 trl==1.16.0 datasets==5.2.0 bitsandbytes==0.50.2 \
  click PyYAML rich plotext hypothesis pytest pytest-xdist
CI=1 .venv-versions/oldest-hf/bin/python -m pytest -q -n 2 --dist loadfile tests/adapters/test_adapter.py tests/adapters/test_huggingface.py \
  tests/adapters/test_huggingface_loss.py tests/adapters/test_accelerate.py
CI=1 .venv-versions/oldest-hf/bin/python -m pytest -q -k huggingface tests/adapters/test_run.py
echo "== trackers that are not in the environment of make test: mlflow-skinny brings 30 packages, trackio an older pillow"
grep -v pillow== constraints.txt > .venv-versions/constraints-trackers.txt
install trackers "$python" -c .venv-versions/constraints-trackers.txt torch numpy click PyYAML rich plotext hypothesis pytest pytest-xdist \
  tensorboard wandb mlflow-skinny==3.17.2 SQLAlchemy==2.1.8 alembic==1.20.1 trackio==0.43.0
BATCHWRIGHT_TRACKERS=all .venv-versions/trackers/bin/python -m pytest -q -n 2 --dist loadfile tests/runtime/loop/test_trackers.py \
  tests/launch/test_trackers.py
echo "== the frameworks whose configurations are read: their own code gives the recorded vectors"
oracles=.venv-versions/oracles
fetch() {  # FOLDER REQUIREMENT [PIP ARGUMENT...]: a package without its dependencies, never torch
  test -e "$oracles/$1/.done" && return
  mkdir -p "$oracles/$1"
  .venv/bin/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target "$oracles/$1" "${@:2}"
  touch "$oracles/$1/.done"
}
fetch megatron-core-0.16 megatron-core==0.16.1
if ! test -e "$oracles/megatron-core-0.19/.done"; then  # for a newer Python; one file is read, and it is plain Python
  .venv/bin/pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
    --platform manylinux_2_28_x86_64 -d "$oracles/megatron-core-0.19" megatron-core==0.19.2
  .venv/bin/python -m zipfile -e "$oracles"/megatron-core-0.19/*.whl "$oracles/megatron-core-0.19"
  touch "$oracles/megatron-core-0.19/.done"
fi
fetch levanter levanter==1.2.dev1644
for package in ai2-olmo-core==3.0.0 llm-foundry==0.22.0 axolotl==0.19.0 verl==0.9.1 torchtitan==0.3.0 llamafactory==0.9.5 \
  nanotron==0.4 openrlhf==0.11.2 megatron-bridge==0.3.1 google-tunix==0.1.7; do
  fetch "${package%%=*}" "$package"
done
if ! test -e "$oracles/deepspeed/.done"; then  # it has no wheel, and its setup needs torch: its files are enough
  mkdir -p "$oracles/deepspeed"
  .venv/bin/pip download --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-binary deepspeed \
    -d "$oracles/deepspeed" deepspeed==0.19.8
  tar xzf "$oracles"/deepspeed/deepspeed-0.19.8.tar.gz -C "$oracles/deepspeed" --strip-components=1
  .venv/bin/pip install --quiet --disable-pip-version-check --no-deps --target "$oracles/deepspeed" \
    hjson==3.1.0 py-cpuinfo==9.0.0 einops==0.8.2 msgpack==1.2.4
  touch "$oracles/deepspeed/.done"
fi
DS_ACCELERATOR=cpu .venv/bin/python -m tests.dialects.oracles "$oracles" --check
