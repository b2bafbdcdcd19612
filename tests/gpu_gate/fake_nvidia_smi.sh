#!/bin/sh
# nvidia-smi as far as the gate asks it, from the same state file as the fake NVML. Lines of its own:
#   smi exit CODE | smi hang SECONDS | smi cut BYTES (cut the output off) | smi mix TEXT (a line in between)
#   smi used GPU MIB (its own idea of the memory used)
state=$FAKE_NVML_STATE
hang=$(sed -n 's/^smi hang //p' "$state"); [ -n "$hang" ] && sleep "$hang"
code=$(sed -n 's/^smi exit //p' "$state")
if [ -n "$code" ]; then echo "Unable to determine the device handle" >&2; exit "$code"; fi
asked=
for argument; do case $argument in --id=*) asked=${argument#--id=};; esac; done
answer() {
  awk -v asked="$asked" '
    BEGIN { n = 0 }
    $1 == "smi" && $2 == "used" { own[$3] = $4 }
    $1 == "smi" && $2 == "mix" { print substr($0, 9) }
    $1 == "gpu" { uuid[n] = $2; total[n] = $4; used[n] = $6; n++ }
    END {
      for (i = 0; i < n; i++) if (index("," asked ",", "," uuid[i] ",") || asked == "")
        printf "%s, %d, %d\n", uuid[i], (i in own) ? own[i] : used[i] / 1048576, total[i] / 1048576
    }' "$state"
}
cut=$(sed -n 's/^smi cut //p' "$state")
if [ -n "$cut" ]; then answer | head -c "$cut"; else answer; fi
