#!/usr/bin/env bash
# mkdocs 1.6.1: `build --strict --quiet` succeeds where `build --strict` fails.
#
# Expected: --strict makes warnings errors, and --quiet only says less: both end with 1 for a page whose link names no page.
# Seen: with --quiet the build ends with 0. The warnings that --strict counts are not counted where the log level hides them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q mkdocs==1.6.1
mkdir "$folder/docs"
printf 'site_name: pages\n' > "$folder/mkdocs.yml"
printf '# Pages\n\n[another](another.md)\n' > "$folder/docs/index.md"
cd "$folder"
loud=0
"$folder/venv/bin/mkdocs" build --strict > "$folder/out" 2>&1 || loud=$?
quiet=0
"$folder/venv/bin/mkdocs" build --strict --quiet || quiet=$?
"$folder/venv/bin/mkdocs" --version
tail -n 3 "$folder/out"
echo "exit codes: --strict $loud, --strict --quiet $quiet"
test "$loud" = 1 && test "$quiet" = 0 || { echo "the behaviour has changed"; exit 1; }
