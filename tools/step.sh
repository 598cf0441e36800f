#!/usr/bin/env bash
# step.sh NAME COMMAND...: runs a check, prints one line with its time; its output only where it fails.
set -u
name=$1; shift
start=$SECONDS
if output=$("$@" 2>&1); then
  printf '  ok    %-16s %ds\n' "$name" $((SECONDS - start))
else
  printf '  FAIL  %-16s\n\n%s\n\ncommand: %s\n' "$name" "$output" "$*"
  exit 1
fi
