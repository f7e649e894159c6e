#!/usr/bin/env bash
# Applies every patch of patches/ to its own version of the framework, and takes it back: nothing may be left.
#
#   scripts/check_patches.sh PATH
#
# PATH is a clone of Megatron-LM or ColossalAI with its tags (bare, too), or the files of one version of it. PATH itself
# is never changed. Exit status: 0 when at least one patch was checked and all of them hold.
set -euo pipefail

if [ $# -ne 1 ] || [ ! -d "$1" ]; then
    echo "usage: scripts/check_patches.sh PATH, a clone or a checkout of Megatron-LM or ColossalAI" >&2
    exit 2
fi
framework=$(cd "$1" && pwd)
patches=$(cd "$(dirname "$0")/../patches" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
checked=0

# The tag that the files of one version belong to.
version_of_files() {
    if [ -f "$framework/megatron/core/package_info.py" ]; then
        sed -n 's/^\(MAJOR\|MINOR\|PATCH\) = //p' "$framework/megatron/core/package_info.py" | paste -sd. | sed 's/^/core_v/'
    elif [ -f "$framework/version.txt" ]; then
        sed 's/^/v/' "$framework/version.txt"
    fi
}

# The files that a patch is about, at a tag, as a repository of their own.
lay_out() {
    local tag=$1 file=$2 target=$3
    mkdir -p "$target/$(dirname "$file")"
    if git -C "$framework" show "$tag:$file" > "$target/$file" 2> /dev/null; then
        return 0
    fi
    [ "$(version_of_files)" = "$tag" ] && [ -f "$framework/$file" ] && cp "$framework/$file" "$target/$file"
}

for patch in "$patches"/*.patch; do
    name=$(basename "$patch" .patch)
    tag=${name#megatron-lm-}
    tag=${tag#colossalai-}
    file=$(sed -n 's|^+++ b/||p' "$patch")
    target=$scratch/$name
    if ! lay_out "$tag" "$file" "$target"; then
        echo "$name: not checked, PATH does not hold $tag"
        continue
    fi
    git -C "$target" init --quiet
    cp "$target/$file" "$scratch/before"
    git -C "$target" apply --unidiff-zero --check "$patch"
    git -C "$target" apply --unidiff-zero "$patch"
    # Only lines were added, and all of them are ours.
    if diff "$scratch/before" "$target/$file" | grep '^<'; then
        echo "$name: it takes lines away" >&2
        exit 1
    fi
    python3 -m py_compile "$target/$file"
    git -C "$target" apply --unidiff-zero --reverse "$patch"
    cmp "$scratch/before" "$target/$file"
    echo "$name: applied and taken back, $file"
    checked=$((checked + 1))
done
if [ "$checked" -eq 0 ]; then
    echo "no patch was checked: $framework is none of the versions that there are patches for" >&2
    exit 1
fi
