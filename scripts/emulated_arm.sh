#!/usr/bin/env bash
# Runs tests on an emulated ARM processor (aarch64), on a Debian or Ubuntu machine of another kind:
#
#     sudo dpkg --add-architecture arm64 && sudo apt-get update
#     sudo apt-get install qemu-user-static g++-aarch64-linux-gnu
#     scripts/emulated_arm.sh FOLDER tests/test_kernels.py [options of pytest]
#
# FOLDER receives Python and the packages for ARM once (2 GB); .venv of this folder is used to fetch them. The compiled
# modules are put beside those of this machine. Tests that start other programs fail: the emulator starts one alone.
# Everything takes some thirty times as long as on a real processor, importing torch 40 s.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
python=${PYTHON:-$here/.venv/bin/python}

if [ ! -e "$folder/root" ]; then
    mkdir -p "$folder/debs" "$folder/root.part/proc"
    (cd "$folder/debs" && apt-get download -q $(printf '%s:arm64 ' python3.11 python3.11-minimal libpython3.11-minimal \
        libpython3.11-stdlib libpython3.11 libpython3.11-dev libc6 libstdc++6 libgcc-s1 libgomp1 zlib1g libexpat1 libssl3 \
        libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libncursesw6 libtinfo6 libreadline8 libuuid1 libcrypt1))
    for package in "$folder"/debs/*.deb; do dpkg -x "$package" "$folder/root.part"; done
    # The emulator shows programs the files of this folder in place of the machine's.
    printf 'processor\t: 0\nFeatures\t: fp asimd asimddp\n' > "$folder/root.part/proc/cpuinfo"
    mv "$folder/root.part" "$folder/root"
fi

if [ ! -e "$folder/site" ]; then
    # Later versions of torch for ARM need CUDA's libraries. The rest is what the tests were pinned with.
    grep -v -i '^#\|^torch==\|^bitsandbytes\|^llama\|^ruff\|^mypy\|^ast-serialize\|^librt\|^schemathesis\|^jsonschema-rs' \
        "$here/constraints.txt" > "$folder/packages.txt"
    platforms=$(printf -- '--platform manylinux_%s_aarch64 ' 2_34 2_31 2_28 2_27 2_26 2_24 2_17; echo --platform manylinux2014_aarch64)
    "$python" -m pip install -q --no-deps --target "$folder/site.part" $platforms --python-version 3.11 --only-binary :all: \
        torch==2.9.1 -r "$folder/packages.txt"
    mv "$folder/site.part" "$folder/site"
fi

"$python" -c 'import nanobind' 2> /dev/null || "$python" -m pip install -q nanobind
"$python" - "$here" "$folder" <<'END'
import subprocess, sys
from pathlib import Path
import nanobind

here, folder = map(Path, sys.argv[1:])
sys.path.insert(0, str(here))
from adaptive.compiled import fingerprint

beside = Path(nanobind.include_dir()).parent
include = [beside / part for part in ("include", "src", "ext/robin_map/include")]
include += [folder / "root/usr/include/python3.11", folder / "root/usr/include"]
for place, name, source, flags in (
    ("adaptive/engines/cpu/native", "neon", "neon.cpp", []),
    ("adaptive/engines/cpu/native", "neondot", "neondot.cpp", ["-march=armv8.2-a+dotprod"]),
    ("adaptive/drafting/native", "suffixes", "module.cpp", []),
):
    native, stamp = here / place, folder / f"{name}.sources"
    out = native / f"{name}.cpython-311-aarch64-linux-gnu.so"
    if out.is_file() and stamp.is_file() and stamp.read_text() == fingerprint(native):
        continue
    print(f"compiling {name}", flush=True)
    common = ["aarch64-linux-gnu-g++", "-std=c++17", "-O3", "-fvisibility=hidden", "-fPIC", "-fwrapv", "-DNDEBUG"]
    common += [f"-DNB_DOMAIN={name}", f'-DADAPTIVE_SOURCES="{fingerprint(native)}"', *flags, *(f"-I{i}" for i in include)]
    objects = [folder / f"{name}-{part}.o" for part in ("nanobind", "module")]
    subprocess.run([*common, "-fno-strict-aliasing", "-c", native / "nanobind.cpp", "-o", objects[0]], check=True)
    subprocess.run([*common, "-c", native / source, "-o", objects[1]], check=True)
    subprocess.run(["aarch64-linux-gnu-g++", "-shared", *objects, "-o", out], check=True)
    stamp.write_text(fingerprint(native))
END

cd "$here"
exec qemu-aarch64-static -cpu max -L "$folder/root" -E "PYTHONPATH=$here:$folder/site" \
    "$folder/root/usr/bin/python3.11" -m pytest -q -o addopts= -p no:cacheprovider -p no:xdist "$@"
