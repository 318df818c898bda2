#!/usr/bin/env bash
# Create the virtual environment and install kvzap-sglang with everything it needs. Run by `make setup`.
#
#   VENV             where (default .venv)
#   PYTHON           the interpreter to build it from, >= 3.11 (default: the first of python3.11 .. python3 that is)
#   TORCH_CPU_INDEX  CPU only: extra package index with torch's +cpu wheels (optional; saves gigabytes where the
#                    default index only has the CUDA build, which works too)
#
# With an NVIDIA GPU: SGLang with all its dependencies. Without: the lean CPU set, a quarter of the size.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${VENV:-.venv}
STAMP=$VENV/.kvzap-setup
INPUTS=(scripts/setup.sh pyproject.toml requirements/*.txt cpu/pyproject.toml cpu/hatch_build.py cpu/*.pth)

fail() {
    echo "setup: $*" >&2
    exit 1
}

has_gpu() { nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        is_new_enough "$PYTHON" || fail "PYTHON=$PYTHON is not a Python >= 3.11: $("$PYTHON" --version 2>&1 || true)"
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3; do
        if is_new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python >= 3.11 found; install one, or set PYTHON=/path/to/python3.11"
}

# run_step TITLE COMMAND...: print "[i/n] TITLE ... s", and the command's output only when it fails.
step=0
run_step() {
    local title=$1 start=$SECONDS log
    shift
    step=$((step + 1))
    printf '[%d/%d] %s ... ' "$step" "$steps" "$title"
    log=$(mktemp)
    if ! "$@" >"$log" 2>&1; then
        echo "failed after $((SECONDS - start)) s"
        cat "$log" >&2
        rm -f "$log"
        fail "step $step ($title) failed; what it printed is above"
    fi
    rm -f "$log"
    echo "$((SECONDS - start)) s"
}

# --no-warn-conflicts: on a CPU most of SGLang's CUDA dependencies are left out on purpose.
pip_install() { "$VENV/bin/pip" install -q --disable-pip-version-check --no-warn-conflicts "$@"; }

install_cpu() {
    local index=()
    [[ -z ${TORCH_CPU_INDEX:-} ]] || index=(--extra-index-url "$TORCH_CPU_INDEX")
    steps=7
    run_step "virtual environment $VENV" make_venv
    run_step "torch 2.13.0" pip_install torch==2.13.0 "${index[@]}"
    run_step "SGLang 0.5.23, triton, torchvision" \
        pip_install --no-deps sglang==0.5.23 triton==3.7.0 torchvision==0.28.0
    run_step "what SGLang needs on a CPU" pip_install -r requirements/cpu.txt
    run_step "development tools, SmolLM2" pip_install -r requirements/dev.txt
    run_step "kvzap-sglang-cpu" pip_install --no-deps -e cpu
    run_step "kvzap-sglang" pip_install --no-deps -e .
}

install_gpu() {
    steps=4
    run_step "virtual environment $VENV" make_venv
    run_step "no CPU stand-ins" "$VENV/bin/pip" uninstall -q -y kvzap-sglang-cpu
    run_step "SGLang 0.5.23 with CUDA (about 11 GB) and kvzap-sglang" pip_install -e .
    run_step "development tools, SmolLM2" pip_install -r requirements/dev.txt
}

make_venv() { [[ -x $VENV/bin/python ]] || "$python" -m venv "$VENV"; }

main() {
    local kind=cpu key python
    has_gpu && kind=gpu
    key="$kind $(cat "${INPUTS[@]}" | sha256sum | cut -d' ' -f1)"
    if [[ -x $VENV/bin/python && -f $STAMP && $(<"$STAMP") == "$key" ]]; then
        echo "setup: $VENV is up to date ($kind)"
        return
    fi
    python=$(find_python)
    echo "setup: $VENV for $kind with $("$python" --version)"
    rm -f "$STAMP"
    "install_$kind"
    echo "$key" >"$STAMP"
    echo "setup: $VENV is ready, $SECONDS s"
}

main
