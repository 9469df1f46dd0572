#!/usr/bin/env bash
# Installs a build to a fresh prefix and uses nothing but that: the examples by find_package, by pkg-config, against the
# shared and the static libraries, and the installed programs. The prefix is moved first: nothing may hold its path.
#   install_check.sh SOURCE_DIR BUILD_DIR
set -euo pipefail
source=$1 build=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cmake --install "$build" --prefix "$work/first" >"$work/log"
mv "$work/first" "$work/prefix"
prefix=$work/prefix
cp -r "$source/examples" "$work/examples"
cd "$work"

fail() {
    printf 'install check: %s\n' "$*" >&2
    exit 1
}
if grep -rlF -e "$build" -e "$source" -e "$work/first" --include='*.cmake' --include='*.pc' "$prefix"; then
    fail 'the files above hold a path of the build'
fi

two() { "$source/tests/mpirun.sh" 2 "$@"; }

echo '-- find_package'
generator=$(sed -n 's/^CMAKE_GENERATOR:INTERNAL=//p' "$build/CMakeCache.txt")
if ! { cmake -S examples -B by_cmake -G "$generator" -DCMAKE_PREFIX_PATH="$prefix" && cmake --build by_cmake; } \
    >>log 2>&1; then
    cat log >&2
    fail 'the examples do not build by find_package'
fi
by_cmake/one_rank
by_cmake/one_rank_static
by_cmake/ops
by_cmake/routing_test
# Says that it skips the device where there is none.
if [ -e by_cmake/routing_test_cuda ]; then by_cmake/routing_test_cuda; fi
has_mpi=0
if [ -e "$prefix/include/epmoe/epmoe_mpi.h" ]; then
    has_mpi=1
    two by_cmake/two_ranks
fi
if readelf -d by_cmake/one_rank_static | grep -q 'NEEDED.*libepmoe'; then fail 'one_rank_static needs libepmoe.so'; fi
readelf -d by_cmake/one_rank | grep -q 'NEEDED.*libepmoe.so' || fail 'one_rank does not need libepmoe.so'

echo '-- pkg-config'
PKG_CONFIG_PATH=$(dirname "$(find "$prefix" -name epmoe.pc)")
libdir=$(dirname "$PKG_CONFIG_PATH")
export PKG_CONFIG_PATH LD_LIBRARY_PATH=$libdir
read -ra flags <<<"$(pkg-config --cflags --libs epmoe)"
read -ra private <<<"$(pkg-config --static --libs epmoe | sed 's/-lepmoe *//')"
"${CC:-cc}" -std=c11 examples/one_rank.c -o one_rank "${flags[@]}" -lm
./one_rank
"${CC:-cc}" -std=c11 examples/one_rank.c -o one_rank_static "${flags[0]}" "$libdir/libepmoe.a" "${private[@]}"
./one_rank_static
"${CXX:-c++}" -std=c++17 examples/ops.cpp -o ops "${flags[@]}"
./ops
"${CC:-cc}" -std=c11 examples/routing_test.c -o routing_test "${flags[@]}" -lm
./routing_test
if [ $has_mpi = 1 ]; then
    read -ra flags <<<"$(pkg-config --cflags --libs epmoe_mpi)"
    mpicc -std=c11 examples/two_ranks.c -o two_ranks "${flags[@]}" -lm
    two ./two_ranks
fi

# A caller of another minor version must be refused, one of a known one accepted.
pkg-config --exact-version="$(sed -n 's/^set(PACKAGE_VERSION "\(.*\)")/\1/p' \
    "$libdir/cmake/epmoe/epmoeConfigVersion.cmake")" epmoe || fail 'the versions of the CMake package and epmoe.pc differ'
mkdir version
printf 'cmake_minimum_required(VERSION 3.22)\nproject(v C)\nfind_package(epmoe ${V} REQUIRED)\n' >version/CMakeLists.txt
version=$(pkg-config --modversion epmoe)
cmake -S version -B version/same -DV="${version%.*}" -DCMAKE_PREFIX_PATH="$prefix" >>log 2>&1 ||
    fail "find_package(epmoe ${version%.*}) fails"
if cmake -S version -B version/next -DV=99.0 -DCMAKE_PREFIX_PATH="$prefix" >>log 2>&1; then
    fail 'find_package(epmoe 99.0) succeeds'
fi

if command -v rustc >/dev/null; then
    echo '-- Rust'
    rustc --edition 2021 -O examples/ops.rs -o ops_rs -L "$libdir"
    ./ops_rs
else
    echo '-- Rust: skipped, there is no rustc'
fi

if command -v python3 >/dev/null; then
    echo '-- Python'
    # No variable names the library: the package finds that of its prefix.
    env -u LD_LIBRARY_PATH -u EPMOE_LIBRARY PYTHONPATH="$prefix/share/epmoe/python" PYTHONDONTWRITEBYTECODE=1 python3 -c '
import array, epmoe
with epmoe.Layer(epmoe.config(hidden=8, intermediate=8, num_experts=2, top_k=1, dtype="float32", max_tokens=1),
                 epmoe.Comm("cpu")) as layer:
    layer.set_random_weights()
    x = epmoe.as_tensor(array.array("f", [1] * 8))
    y = layer.forward(epmoe.Tensor((1, 8), "float32", "cpu", x.pointer, x)).tolist()
    print("epmoe", epmoe.__version__, y[0][:2])
    assert any(y[0])
'
else
    echo '-- Python: skipped, there is no python3'
fi

echo '-- installed programs'
"$prefix/bin/moe_layer_bench" --list-models >/dev/null
"$prefix/bin/moe_tool" --help >/dev/null
echo 'install check: ok'
