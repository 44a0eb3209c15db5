#!/usr/bin/env bash
# Builds the sdist and, from it, the wheel, and checks their content. Then, in an environment with only the wheel and outside
# the checkout, it checks the command line, the README's two commands, and what pip uninstall leaves. The files stay in
# dist/.
#
#   VENV   folder of the environment, made anew (default: .venv-package); VENV-tools, for building, is next to it
#   STEPS  training steps of each run of the quickstart (default: 6)
#   PYTHON, TORCH_INDEX: see environment.sh
# Arguments go to pytest, in place of a few files of tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/environment.sh

VENV=$(realpath -m "${VENV:-.venv-package}")
CHECKOUT=$PWD TOOLS=$VENV-tools/bin/python
export VENV STEPS=${STEPS:-6}
unset PACKAGE PYTHONPATH TORCH_VERSION TORCH_DEVICE_BACKEND_AUTOLOAD "${!MINDSPEED@}"
[ ! -e "$VENV" ] || [ -e "$VENV/pyvenv.cfg" ] || fail "VENV: $VENV: is no virtual environment, and would be removed; name another folder"

make_venv "$VENV-tools"
"$TOOLS" -m pip --disable-pip-version-check --quiet --quiet install 'build>=1.2,<2' 'twine>=6,<7'
stage "sdist and wheel"
rm -rf dist
"$TOOLS" -m build >"$VENV-tools/build.log" 2>&1 || fail "$(tail -n 20 "$VENV-tools/build.log")"
"$TOOLS" -m twine check --strict dist/*
"$TOOLS" ci/package_contents.py dist/*.tar.gz dist/*.whl
PACKAGE=$(realpath dist/*.whl)
export PACKAGE

rm -rf "$VENV"
OUTPUT=$VENV/quickstart-output bash examples/qwen3_5_35b/quickstart.sh

mkdir "$VENV/elsewhere"
cd "$VENV/elsewhere"
stage "the command line"
"$VENV/bin/mindspeed-chunk" --version
"$VENV/bin/python" -m mindspeed_chunk.tools --version
"$VENV/bin/mindspeed-chunk" lint "$CHECKOUT/examples/qwen3_5_35b/qwen3_5_35b_npu.yaml"
"$VENV/bin/mindspeed-chunk" doctor --json >doctor.json || true # without MindSpeed-MM it must say no
"$VENV/bin/python" - <<'END'
import json

report = json.load(open("doctor.json"))
(reason,) = report["reasons"]
assert "MindSpeed-MM is not found" in reason, reason
assert report["autoload"] == {"on": True, "torch_calls_it": True, "entry_point": True}, report["autoload"]
print(f"doctor: {reason}")
END

cd "$CHECKOUT"
[ $# != 0 ] || set -- -q tests/test_{compatibility,config,config_document,package,public_api}.py \
    tests/lint/test_lint_command.py tests/moe/test_moe_schedule.py
bash ci/test.sh "$@"

stage "pip uninstall"
cd "$VENV/elsewhere"
"$VENV/bin/python" -m pip --disable-pip-version-check --quiet uninstall --yes mindspeed_chunk
left=$(find "$VENV/bin" "$VENV/lib" -iname '*mindspeed*')
[ -z "$left" ] || fail "left behind: $left"
told=$("$VENV/bin/python" -c 'import torch' 2>&1) && [ -z "$told" ] || fail "import torch, after pip uninstall: $told"
stage "in dist: $(ls "$CHECKOUT/dist" | xargs)"
