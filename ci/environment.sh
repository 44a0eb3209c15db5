# Sourced by the scripts that need their own virtual environment.
#
#   PYTHON       interpreter to make it from (default: python3)
#   TORCH_INDEX  package index to take torch from (default: pip's own configuration, which PIP_INDEX_URL also changes)
#   PACKAGE      a wheel of this package, to be installed in place of the checkout

stage() {
    printf '==> %s\n' "$*"
}

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# make_environment FOLDER TORCH_VERSION EXTRAS: a virtual environment with that torch and this checkout, editable, or with
# the wheel PACKAGE.
make_environment() {
    local folder=$1 torch=$2 extras=$3
    local pip=("$folder/bin/python" -m pip --disable-pip-version-check --quiet --quiet)
    make_venv "$folder" "$extras"
    stage "torch $torch"
    "${pip[@]}" install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==$torch"
    stage "mindspeed_chunk with [$extras]${PACKAGE:+ from $PACKAGE}"
    if [ -n "${PACKAGE:-}" ]; then
        "${pip[@]}" uninstall --yes mindspeed_chunk # another build of the same version would be left as it is
        "${pip[@]}" install "${PACKAGE}[$extras]"
    else
        "${pip[@]}" install --editable ".[$extras]"
    fi
}

# make_venv FOLDER [EXTRAS]: a virtual environment with only pip; an existing one is kept. transformers, of the extra
# standalone, is what needs Python 3.11.
make_venv() {
    local folder=$1 python=${PYTHON:-python3} oldest=11
    [[ ,${2:-standalone}, == *,standalone,* ]] || oldest=10
    command -v "$python" >/dev/null || fail "$python: not found; install Python 3.$oldest to 3.13 or set PYTHON"
    "$python" -c "import sys; sys.exit(not (3, $oldest) <= sys.version_info[:2] <= (3, 13))" ||
        fail "$python is $("$python" -V 2>&1): needs Python 3.$oldest to 3.13; set PYTHON to one"
    if ! "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
        ensure_venv "$python"
        stage "virtual environment: $folder ($("$python" -V))"
        "$python" -m venv "$folder"
    fi
}

# beside_package FOLDER: with PACKAGE, continue in a copy of the checkout that lacks the package, FOLDER/checkout. In the
# checkout's own root Python would import the package from there.
beside_package() {
    [ -n "${PACKAGE:-}" ] || return 0
    local copy=$1/checkout
    rm -rf "$copy"
    mkdir "$copy"
    cp -r ./*.md LICENSE pyproject.toml setup.py .ci .github benchmarks ci docs examples patches tests "$copy"
    cd "$copy"
    "$1/bin/python" -c 'import mindspeed_chunk, sys; sys.exit("site-packages" not in mindspeed_chunk.__file__)' ||
        fail "python in $copy does not import the installed mindspeed_chunk; unset PYTHONPATH"
}

# Debian and Ubuntu have a part of Python's venv in a separate package.
ensure_venv() {
    "$1" -c 'import ensurepip, venv' 2>/dev/null && return
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        fail "$1 has no venv: install it (Debian, Ubuntu: apt-get install python3-venv)"
    fi
    stage "python3-venv, which $1 lacks"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends python3-venv >/dev/null
    "$1" -c 'import ensurepip, venv' 2>/dev/null || fail "$1 still has no venv: install the one that belongs to it"
}

# unpack_torch_npu FOLDER TORCH_VERSION: the wheel of torch_npu for that torch, unpacked in FOLDER/torch_npu-wheel, where
# the tests in tests/ascend look for it. It is not installed: without Ascend's CANN it would break every import of torch.
unpack_torch_npu() {
    local folder=$1 version=${2%%+*} wheel=$1/torch_npu-wheel
    [ -d "$wheel/torch_npu-$version.dist-info" ] && return
    stage "wheel of torch_npu $version"
    rm -rf "$wheel" "$wheel.download"
    if "$folder/bin/python" -m pip --disable-pip-version-check --quiet --quiet download \
        --no-deps --only-binary :all: --dest "$wheel.download" "torch_npu==$version"; then
        "$folder/bin/python" -m zipfile -e "$wheel.download"/torch_npu-*.whl "$wheel"
        rm -rf "$wheel.download"
    elif [ -n "${CI:-}" ]; then
        fail "no wheel of torch_npu $version for $("$folder/bin/python" -V): the Ascend tests cannot run; use Python 3.11"
    else
        printf 'warning: no wheel of torch_npu %s for this Python: the tests in tests/ascend will be skipped\n' "$version" >&2
    fi
}
