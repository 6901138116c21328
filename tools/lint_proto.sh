#!/usr/bin/env bash
# Lint proto/ with buf (rules in buf.yaml): the one on PATH, else the pinned one through npm, else say why not.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

BUF_VERSION=1.75.0

skip() {
    echo "proto lint SKIPPED: $1" >&2
    exit 0
}

if command -v buf >/dev/null; then
    buf=(buf)
elif command -v npx >/dev/null; then
    buf=(npx --yes --loglevel=error "@bufbuild/buf@${BUF_VERSION}")
    "${buf[@]}" --version >/dev/null 2>&1 || skip "npm is here, but cannot fetch buf ${BUF_VERSION}"
else
    skip "neither buf nor npm is installed"
fi

"${buf[@]}" lint
echo "proto lint: no findings (buf $("${buf[@]}" --version 2>&1))"
